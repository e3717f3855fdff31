"""FastAPI peer: one image per request, in a sync endpoint on the thread pool."""

from typing import Annotated

import uvicorn
from fastapi import Depends, FastAPI, Request
from image import HOST, Label, options, preprocess, score, session, top5


async def body(request: Request) -> bytes:
    """Read the raw body, which a sync endpoint cannot await."""
    return await request.body()


def build(path: str) -> FastAPI:
    """Make the application around one copy of the model."""
    app = FastAPI()
    model = session(path)

    @app.get("/health")
    def health() -> str:
        """Answer that the model is loaded."""
        return "ok"

    @app.post("/classify")
    def classify(jpeg: Annotated[bytes, Depends(body)]) -> list[Label]:
        """Classify one JPEG."""
        return top5(score(model, [preprocess(jpeg)])[0])

    return app


def main() -> None:
    """Serve until SIGTERM."""
    chosen = options()
    uvicorn.run(build(chosen.model), host=HOST, port=chosen.port, log_level="warning")


if __name__ == "__main__":
    main()
