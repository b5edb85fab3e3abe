"""The plain way to serve sentence vectors: FastAPI and a pipeline of `transformers`, one request at a time."""

from __future__ import annotations

import argparse

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import pipeline


class Body(BaseModel):
    inputs: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    pipe = pipeline("feature-extraction", arguments.model, device="cpu")
    app = FastAPI()

    @app.post("/embed")
    async def embed(body: Body) -> list[list[float]]:
        states = pipe(body.inputs, return_tensors=True, truncation=True)[0]
        return [torch.nn.functional.normalize(states.mean(0), dim=0).tolist()]

    @app.get("/health")
    async def health() -> str:
        return "ok"

    uvicorn.run(app, port=arguments.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
