"""A client of winnow's gRPC service, for threads and for asyncio.

    from winnow_client import Client
    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=32).text)
        for piece in client.stream(messages=[("user", "Hello")], policy="lsh:k=2%"):
            print(piece.text, end="", flush=True)
"""
from .admin import Admin, AsyncAdmin
from .client import AsyncClient, Client
from .errors import RetryPolicy, WinnowError
from .types import Answer, Choice, Piece, PromptToken, TokenPiece

__all__ = ["Admin", "Answer", "AsyncAdmin", "AsyncClient", "Choice", "Client", "Piece", "PromptToken", "RetryPolicy", "TokenPiece", "WinnowError"]
