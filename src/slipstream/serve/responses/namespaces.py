"""Functions of a response's tools, those that are grouped in namespaces too: a chat knows them by one name each."""

from collections.abc import Iterator, Mapping, Sequence

from slipstream.serve.errors import HttpError
from slipstream.serve.stream import Json

_FIELDS = ("name", "description", "parameters", "strict")


def flat_name(namespace: object, name: str) -> str:
    """Return what a chat calls a function; those that stand alone keep their name."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def chat_tools(tools: Sequence[Json]) -> list[Json]:
    """Return a response's tools in the form chats have them; raises HttpError."""
    return [tool for at, raw in enumerate(tools) for tool in _functions(raw, f"tools[{at}]")]


def grouped_names(tools: Sequence[Json]) -> Mapping[str, tuple[str, str]]:
    """Return namespace and name of each function that is grouped, by what a chat calls it."""
    return {
        flat_name(group["name"], one["name"]): (group["name"], one["name"])
        for group in tools
        if group.get("type") == "namespace"
        for one in group["tools"]
    }


def _functions(raw: Json, where: str) -> Iterator[Json]:
    kind = raw.get("type")
    if kind == "namespace":
        within, name = raw.get("tools"), raw.get("name")
        if not isinstance(within, list) or not isinstance(name, str) or not name:
            raise HttpError(400, f"{where} is a namespace; it needs a name and tools.", param=where)
        for at, one in enumerate(within):
            place = f"{where}.tools[{at}]"
            if not isinstance(one, dict) or one.get("type") != "function" or not isinstance(one.get("name"), str):
                raise HttpError(400, f"{place} is no function with a name; a namespace holds those.", param=place)
            yield from _functions({**one, "name": flat_name(name, one["name"])}, place)
        return
    if kind != "function":
        raise HttpError(
            400,
            f"{where}.type is {str(kind)[:64]!r}; this server has no tools of its own; send functions.",
            param=f"{where}.type",
        )
    own = {name: raw[name] for name in _FIELDS if raw.get(name) is not None}
    yield {"type": "function", "function": raw.get("function", own)}
