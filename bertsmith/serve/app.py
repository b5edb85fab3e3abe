"""The application: routes, guard and errors around a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from bertsmith import __version__
from bertsmith.serve import compatible, documentation, page, routes
from bertsmith.serve.errors import add_handlers
from bertsmith.serve.guard import Guard
from bertsmith.serve.models import Models
from bertsmith.serve.service import Service
from bertsmith.serve.settings import ServeConfig


def create_app(models: Models, config: ServeConfig | None = None) -> FastAPI:
    """Return an ASGI application that serves models; its shutdown computes what waits."""
    config = config or ServeConfig()
    service = Service(models, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="bertsmith",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        description="Predictions over HTTP.",
    )
    app.state.service = service
    app.include_router(routes.router)
    app.include_router(compatible.router)
    app.include_router(documentation.router)
    app.include_router(page.router)
    add_handlers(app)
    app.add_middleware(Guard, config=config, metrics=service.metrics)  # type: ignore[arg-type]
    if config.cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app
