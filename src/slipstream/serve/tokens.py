"""The routes that turn texts and chats into tokens, and back: vLLM's, and SGLang's lists of them."""

from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from slipstream.serve.convert import MAX_TOKENIZED
from slipstream.serve.errors import HttpError
from slipstream.serve.protocol import DetokenizeRequest, TokenizeRequest
from slipstream.serve.service import Service
from slipstream.serve.stream import Json
from slipstream.serve.tools.protocol import choice_of


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post("/tokenize", tags=["tokens"])
    @app.post("/v1/tokenize", include_in_schema=False)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the tokens of a text, of several, or of a chat."""
        service.converter.check_model(body.model)
        return await service.token_threads.run(len(await request.body()), lambda: JSONResponse(_tokens(service, body)))

    @app.post("/detokenize", tags=["tokens"])
    @app.post("/v1/detokenize", include_in_schema=False)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of tokens, or of several lists of them."""
        service.converter.check_model(body.model)
        return await service.token_threads.run(len(await request.body()), lambda: JSONResponse(_texts(service, body)))


def _tokens(service: Service, body: TokenizeRequest) -> Json:
    """Return the tokens; lists of lists where several texts were sent."""
    texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
    if body.messages is not None:
        choice = choice_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        texts = [service.converter.chat_text(body, body.messages, choice)]
    # A template writes special tokens itself; vLLM's default is the same.
    special = body.add_special_tokens if body.add_special_tokens is not None else body.messages is None
    found = _encoded(service, texts, special, "prompt" if body.messages is None else "messages")
    names = [[service.tokenizer.entry(token) for token in ids] for ids in found if body.return_token_strs]
    counts = [len(ids) for ids in found]
    several = isinstance(body.prompt, list)
    return {
        "tokens": found if several else found[0],
        "count": counts if several else counts[0],
        "token_strs": None if not names else names if several else names[0],
        "max_model_len": service.engine.config.max_context,
    }


def _encoded(service: Service, texts: Sequence[str], special: bool, field: str) -> list[list[int]]:
    found: list[list[int]] = []
    room = MAX_TOKENIZED
    for text in texts:
        found.append(service.converter.encode(text, special, room, field))
        room -= len(found[-1])
    return found


def _texts(service: Service, body: DetokenizeRequest) -> Json:
    """Return the text by vLLM's name and by SGLang's."""
    lists = [one for one in body.tokens if isinstance(one, list)]
    several = bool(lists)
    if not several:
        lists = [[one for one in body.tokens if isinstance(one, int)]]
    last = service.engine.vocab_size - 1
    wrong = next((token for ids in lists for token in ids if token > last), None)
    if wrong is not None:
        raise HttpError(400, f"tokens has {wrong}; ids end at {last}.", param="tokens")
    texts = [service.tokenizer.decode(ids, body.skip_special_tokens) for ids in lists]
    text = texts if several else texts[0]
    return {"prompt": text, "text": text}
