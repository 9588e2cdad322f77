"""Speculation at run time: what it does now, and routes to change tree or draft, or simulate acceptance."""

import asyncio
import logging
from collections.abc import Sequence

from fastapi import FastAPI

from slipstream.engine.drafts import DraftShelf, ReadDraft
from slipstream.engine.engine import Engine
from slipstream.errors import CheckpointError, ConfigError
from slipstream.serve.answers import speculation_json
from slipstream.serve.errors import HttpError
from slipstream.serve.protocol import DraftRequest, TreeRequest
from slipstream.serve.stream import Json
from slipstream.serve.worker import EngineWorker
from slipstream.speculation.tree import TreeShape

logger = logging.getLogger(__name__)


def add_routes(app: FastAPI, engine: Engine, worker: EngineWorker, shelf: DraftShelf) -> None:
    """Add the routes. The gate keeps /admin to those who may."""

    @app.get("/speculation", tags=["information"])
    async def speculation() -> Json:
        """Say how the server speculates, and how well, since it started."""
        return describe(engine)

    @app.post("/admin/speculation", tags=["admin"], responses={400: {"description": "The change is impossible."}})
    async def change(body: TreeRequest) -> Json:
        """Change the tree's shape or the simulated rates from the next step on; what is left out stays."""

        def apply(engine: Engine) -> None:
            before = engine.simulated_acceptance
            if body.simulated_acceptance is not None:
                engine.simulate_acceptance(body.simulated_acceptance)
            if body.depth is not None or body.width is not None or body.budget is not None:
                try:
                    engine.set_tree(_changed(engine.drafter.shape, body))
                except ConfigError:
                    engine.simulate_acceptance(before)  # all of a change or none of it
                    raise

        try:
            await worker.call(apply)
        except ConfigError as error:
            raise HttpError(400, str(error)) from error
        logger.info("speculation changed: %s", engine.drafter.shape)
        warn_if_simulated(engine.simulated_acceptance)
        return describe(engine)

    @app.get("/admin/draft", tags=["admin"])
    async def draft() -> Json:
        """Say which draft is in use, which one was before it, and what each has served."""
        return await worker.call(lambda engine: _drafts(shelf))

    @app.post("/admin/draft", tags=["admin"], responses={400: {"description": "The draft cannot take over."}})
    async def exchange(body: DraftRequest) -> Json:
        """Exchange the draft between two steps; no answer changes by it. Decoding goes on while it is read."""
        if (body.path is None) != body.go_back:
            raise HttpError(400, "Say either 'path', a draft's folder, or 'go_back': true.")

        def apply(chosen: ReadDraft | None) -> Json:
            if chosen is None:
                shelf.go_back()
            else:
                shelf.use(chosen)
            return _drafts(shelf)

        try:
            chosen = None if body.path is None else await asyncio.to_thread(shelf.read, body.path)
            told = await worker.call(lambda engine: apply(chosen))
        except (ConfigError, CheckpointError) as error:
            raise HttpError(400, str(error)) from error
        logger.info("draft exchanged: %s", shelf.name)
        return told


def _drafts(shelf: DraftShelf) -> Json:
    served = [
        {"draft": one.name, "passes": one.passes, "tokens": one.tokens, "acceptance_length": one.acceptance_length}
        for one in shelf.served()
    ]
    return {"draft": shelf.name, "before": shelf.name_before, "served": served}


def describe(engine: Engine) -> Json:
    """Return the state of speculation as JSON."""
    shape = engine.drafter.shape
    return {
        "drafter": engine.drafter.name,
        "tree": None if shape is None else {"depth": shape.depth, "width": shape.width, "budget": shape.budget},
        "tree_description": "none" if shape is None else str(shape),
        "simulated_acceptance": list(engine.simulated_acceptance),
        "drafting": engine.explain_drafting(),
        "statistics": speculation_json(engine.stats.acceptance, engine.simulated_acceptance),
    }


def warn_if_simulated(rates: Sequence[float]) -> None:
    """Say in the log that answers are not the model's."""
    if rates:
        logger.warning(
            "SIMULATED ACCEPTANCE %s: drafted tokens are kept by these rates, so answers are not the model's.",
            list(rates),
        )


def _changed(shape: TreeShape | None, body: TreeRequest) -> TreeShape:
    old = shape or TreeShape()
    return TreeShape(
        depth=old.depth if body.depth is None else body.depth,
        width=old.width if body.width is None else body.width,
        budget=old.budget if body.budget is None else body.budget,
    )
