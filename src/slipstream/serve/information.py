"""Routes that tell about the server: the playground, models, health, metrics, version and the API's description."""

import importlib.resources
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

import slipstream
from slipstream.serve.docs_page import docs_page
from slipstream.serve.metrics import CONTENT_TYPE
from slipstream.serve.service import Service
from slipstream.serve.stream import Json

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

_UNWELL: dict[int | str, dict[str, Any]] = {503: {"description": "No."}}


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    config, worker = service.config, service.worker
    page = importlib.resources.files("slipstream.serve").joinpath("playground.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def playground() -> HTMLResponse:
        """Return the playground."""
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """Describe the API."""
        return HTMLResponse(docs_page(app.openapi()), headers=_PAGE_HEADERS)

    @app.get("/v1/models", tags=["information"])
    async def models() -> Json:
        """List the one model served, under each of its names."""
        names = (config.model_name, *config.aliases)
        return {"object": "list", "data": [_model(name, service) for name in names]}

    @app.get("/v1/models/{name:path}", tags=["information"])
    async def model(name: str) -> Json:
        """Describe the model."""
        service.converter.check_model(name)
        return _model(name, service)

    @app.get("/health", responses=_UNWELL, tags=["information"])
    @app.get("/health/ready", responses=_UNWELL, tags=["information"])
    async def ready() -> Response:
        """Tell whether requests are taken."""
        is_ready = worker.alive and not worker.draining
        return _health("ready" if is_ready else "not ready", is_ready, worker.trouble)

    @app.get("/health/live", responses=_UNWELL, tags=["information"])
    @app.get("/ping", include_in_schema=False)
    async def live() -> Response:
        """Tell whether the engine's thread runs; a server that is not live should be restarted."""
        return _health("live" if worker.alive else "dead", worker.alive, worker.trouble)

    @app.get("/metrics", response_class=PlainTextResponse, tags=["information"])
    async def metrics() -> Response:
        """Return Prometheus metrics."""
        return PlainTextResponse(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/version", tags=["information"])
    async def version() -> Json:
        """Return the server's version."""
        return {"version": slipstream.__version__}


def _health(status: str, is_well: bool, trouble: str | None) -> Response:
    return JSONResponse({"status": status} | ({} if trouble is None else {"reason": trouble}), 200 if is_well else 503)


def _model(name: str, service: Service) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "slipstream",
        "root": service.config.model_name,
        "max_model_len": service.engine.config.max_context,
    }
