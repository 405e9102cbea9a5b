"""Client and AsyncClient: the same methods, for threads and for asyncio."""
import asyncio
import time
from typing import Any, AsyncIterator, Iterator, List, Optional, Tuple

import grpc
import grpc.aio

from . import winnow_inference_pb2 as pb
from . import winnow_prefix_pb2 as prefix_pb
from .errors import RetryPolicy, WinnowError, from_rpc
from .types import Answer, Choice, Messages, Piece, Prompt, make_request, set_prompt, to_piece

_SERVICE = "/winnow.v1.InferenceService/"
_PREFIXES = "/winnow.v1.PrefixService/"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class _Base:
    """What both have in common: the address, who asks, and what is tried again.

    `root_certificates`: PEM, with it (or `tls`) the connection is encrypted. `private_key` and `certificate_chain`: who we are, PEM.
    `timeout`: seconds of each call with all its attempts; None: none.
    """

    def __init__(self, address: str, *, api_key: Optional[str] = None, tenant: Optional[str] = None, tls: bool = False,
                 root_certificates: Optional[bytes] = None, private_key: Optional[bytes] = None,
                 certificate_chain: Optional[bytes] = None, timeout: Optional[float] = None, retry: Optional[RetryPolicy] = None):
        self._timeout, self._retry = timeout, retry or RetryPolicy()
        self._metadata: List[Tuple[str, str]] = []
        if api_key is not None:
            self._metadata.append(("authorization", f"Bearer {api_key}"))
        if tenant is not None:
            self._metadata.append(("x-winnow-tenant", tenant))
        credentials = None
        if tls or root_certificates is not None or certificate_chain is not None:
            credentials = grpc.ssl_channel_credentials(root_certificates, private_key, certificate_chain)
        self._channel = self._connect(address, credentials)
        unary = lambda name, response, service=_SERVICE: self._channel.unary_unary(  # noqa: E731
            service + name, lambda message: message.SerializeToString(), response.FromString)
        self._generate = self._channel.unary_stream(_SERVICE + "Generate", lambda message: message.SerializeToString(),
                                                    pb.GenerateResponse.FromString)
        self._tokenize = unary("Tokenize", pb.TokenizeResponse)
        self._detokenize = unary("Detokenize", pb.DetokenizeResponse)
        self._get_model = unary("GetModel", pb.GetModelResponse)
        self._put_prefix = unary("PutPrefix", prefix_pb.PutPrefixResponse, _PREFIXES)
        self._list_prefixes = unary("ListPrefixes", prefix_pb.ListPrefixesResponse, _PREFIXES)
        self._pin_prefix = unary("PinPrefix", prefix_pb.PinPrefixResponse, _PREFIXES)
        self._delete_prefix = unary("DeletePrefix", prefix_pb.DeletePrefixResponse, _PREFIXES)

    def _connect(self, address: str, credentials: Optional[grpc.ChannelCredentials]) -> Any:
        raise NotImplementedError

    @staticmethod
    def _put_request(name: str, prompt: Prompt, messages: Messages, pinned: bool, ttl_seconds: int) -> prefix_pb.PutPrefixRequest:
        request = prefix_pb.PutPrefixRequest(name=name, pinned=pinned, ttl_seconds=ttl_seconds)
        set_prompt(request, prompt, messages)
        return request

    def _ends(self) -> Optional[float]:
        return None if self._timeout is None else time.monotonic() + self._timeout

    @staticmethod
    def _left(ends: Optional[float]) -> Optional[float]:
        return None if ends is None else max(ends - time.monotonic(), 0)

    def _pause(self, error: WinnowError, attempt: int, ends: Optional[float]) -> float:
        """Seconds until the next attempt; raises the error where there is none, or no time for it."""
        pause = self._retry.pause(error, attempt)
        left = self._left(ends)
        if pause is None or (left is not None and pause >= left):
            raise error
        return pause


class Client(_Base):
    """For threads; may be used by several at once."""

    def _connect(self, address, credentials):
        if credentials is None:
            return grpc.insecure_channel(address, _OPTIONS)
        return grpc.secure_channel(address, credentials, _OPTIONS)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def stream(self, prompt: Prompt = None, *, messages: Messages = None, **options: Any) -> Iterator[Piece]:
        """Pieces of the answer as they come. Options are the fields of SamplingOptions, StoppingOptions and GenerateRequest: max_tokens,
        temperature, top_p, seed, stop_strings, n, top_logprobs, prompt_logprobs, policy and so on; those of CacheOptions as cache_use, cache_store,
        cache_priority, cache_ttl_seconds, cache_salt. Leaving the loop cancels the call."""
        request, ends, attempt = make_request(prompt, messages, options), self._ends(), 1
        while True:
            begun = False
            call = self._generate(request, timeout=self._left(ends), metadata=self._metadata)
            try:
                for message in call:
                    begun = True
                    yield to_piece(message)
                return
            except grpc.RpcError as error:
                failure = from_rpc(error)
                if begun:
                    raise failure from error
                pause = self._pause(failure, attempt, ends)
            finally:
                call.cancel()
            time.sleep(pause)
            attempt += 1

    def generate(self, prompt: Prompt = None, *, messages: Messages = None, **options: Any) -> Answer:
        """The whole answer; options as of `stream`."""
        answer = Answer([Choice() for _ in range(options.get("n") or 1)])
        for piece in self.stream(prompt, messages=messages, **options):
            answer.add(piece)
        return answer

    def _unary(self, method: Any, request: Any) -> Any:
        ends, attempt = self._ends(), 1
        while True:
            try:
                return method(request, timeout=self._left(ends), metadata=self._metadata)
            except grpc.RpcError as error:
                pause = self._pause(from_rpc(error), attempt, ends)
            time.sleep(pause)
            attempt += 1

    def tokenize(self, prompt: Optional[str] = None, *, messages: Messages = None) -> List[int]:
        request = pb.TokenizeRequest()
        set_prompt(request, prompt, messages)
        return list(self._unary(self._tokenize, request).ids)

    def detokenize(self, ids: List[int], show_special_tokens: bool = False) -> str:
        return self._unary(self._detokenize, pb.DetokenizeRequest(ids=ids, show_special_tokens=show_special_tokens)).text

    def model(self) -> pb.GetModelResponse:
        return self._unary(self._get_model, pb.GetModelRequest())

    def put_prefix(self, name: str, prompt: Prompt = None, *, messages: Messages = None, pinned: bool = False,
                   ttl_seconds: int = 0) -> prefix_pb.PutPrefixResponse:
        """Computes the prefix ahead of time and names it; `ttl_seconds` 0: for good. Of `messages` the answer's opening is left out."""
        return self._unary(self._put_prefix, self._put_request(name, prompt, messages, pinned, ttl_seconds))

    def list_prefixes(self, name: str = "") -> List[prefix_pb.Prefix]:
        return list(self._unary(self._list_prefixes, prefix_pb.ListPrefixesRequest(name=name)).prefixes)

    def pin_prefix(self, name: str, pinned: Optional[bool] = True, ttl_seconds: Optional[int] = None) -> prefix_pb.Prefix:
        """Changes what is not None."""
        request = prefix_pb.PinPrefixRequest(name=name, pinned=pinned, ttl_seconds=ttl_seconds)
        return self._unary(self._pin_prefix, request).prefix

    def delete_prefix(self, name: str) -> None:
        """Forgets the name and its KV."""
        self._unary(self._delete_prefix, prefix_pb.DeletePrefixRequest(name=name))


class AsyncClient(_Base):
    """For asyncio; of the event loop in which it is made."""

    def _connect(self, address, credentials):
        if credentials is None:
            return grpc.aio.insecure_channel(address, _OPTIONS)
        return grpc.aio.secure_channel(address, credentials, _OPTIONS)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def stream(self, prompt: Prompt = None, *, messages: Messages = None, **options: Any) -> AsyncIterator[Piece]:
        request, ends, attempt = make_request(prompt, messages, options), self._ends(), 1
        while True:
            begun = False
            call = self._generate(request, timeout=self._left(ends), metadata=self._metadata)
            try:
                async for message in call:
                    begun = True
                    yield to_piece(message)
                return
            except grpc.aio.AioRpcError as error:
                failure = from_rpc(error)
                if begun:
                    raise failure from error
                pause = self._pause(failure, attempt, ends)
            finally:
                call.cancel()
            await asyncio.sleep(pause)
            attempt += 1

    async def generate(self, prompt: Prompt = None, *, messages: Messages = None, **options: Any) -> Answer:
        answer = Answer([Choice() for _ in range(options.get("n") or 1)])
        async for piece in self.stream(prompt, messages=messages, **options):
            answer.add(piece)
        return answer

    async def _unary(self, method: Any, request: Any) -> Any:
        ends, attempt = self._ends(), 1
        while True:
            try:
                return await method(request, timeout=self._left(ends), metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                pause = self._pause(from_rpc(error), attempt, ends)
            await asyncio.sleep(pause)
            attempt += 1

    async def tokenize(self, prompt: Optional[str] = None, *, messages: Messages = None) -> List[int]:
        request = pb.TokenizeRequest()
        set_prompt(request, prompt, messages)
        return list((await self._unary(self._tokenize, request)).ids)

    async def detokenize(self, ids: List[int], show_special_tokens: bool = False) -> str:
        request = pb.DetokenizeRequest(ids=ids, show_special_tokens=show_special_tokens)
        return (await self._unary(self._detokenize, request)).text

    async def model(self) -> pb.GetModelResponse:
        return await self._unary(self._get_model, pb.GetModelRequest())

    async def put_prefix(self, name: str, prompt: Prompt = None, *, messages: Messages = None, pinned: bool = False,
                   ttl_seconds: int = 0) -> prefix_pb.PutPrefixResponse:
        return await self._unary(self._put_prefix, self._put_request(name, prompt, messages, pinned, ttl_seconds))

    async def list_prefixes(self, name: str = "") -> List[prefix_pb.Prefix]:
        return list((await self._unary(self._list_prefixes, prefix_pb.ListPrefixesRequest(name=name))).prefixes)

    async def pin_prefix(self, name: str, pinned: Optional[bool] = True, ttl_seconds: Optional[int] = None) -> prefix_pb.Prefix:
        request = prefix_pb.PinPrefixRequest(name=name, pinned=pinned, ttl_seconds=ttl_seconds)
        return (await self._unary(self._pin_prefix, request)).prefix

    async def delete_prefix(self, name: str) -> None:
        await self._unary(self._delete_prefix, prefix_pb.DeletePrefixRequest(name=name))
