"""Admin and AsyncAdmin: the operator's calls, on the port of --admin-listen."""
from typing import Any, Optional

import grpc
import grpc.aio

from . import winnow_admin_pb2 as pb
from .errors import from_rpc

_SERVICE = "/winnow.v1.AdminService/"


class _Base:
    """`api_key`: the key of the name admin, where the server asks for keys."""

    def __init__(self, channel: Any, api_key: Optional[str], timeout: Optional[float]):
        self._channel, self._timeout = channel, timeout
        self._metadata = [] if api_key is None else [("authorization", f"Bearer {api_key}")]
        unary = lambda name, response: channel.unary_unary(  # noqa: E731
            _SERVICE + name, lambda message: message.SerializeToString(), response.FromString)
        self._drain = unary("Drain", pb.DrainResponse)
        self._get_state = unary("GetState", pb.GetStateResponse)
        self._set_log_level = unary("SetLogLevel", pb.SetLogLevelResponse)


class Admin(_Base):
    def __init__(self, address: str, *, api_key: Optional[str] = None, timeout: Optional[float] = 10):
        super().__init__(grpc.insecure_channel(address), api_key, timeout)

    def __enter__(self) -> "Admin":
        return self

    def __exit__(self, *_: Any) -> None:
        self._channel.close()

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc(error) from error

    def drain(self) -> int:
        """Ends the server as SIGTERM does; the calls that are open."""
        return self._call(self._drain, pb.DrainRequest()).calls

    def state(self) -> pb.GetStateResponse:
        return self._call(self._get_state, pb.GetStateRequest())

    def set_log_level(self, level: str) -> str:
        """The level that it was."""
        return self._call(self._set_log_level, pb.SetLogLevelRequest(level=level)).previous_level


class AsyncAdmin(_Base):
    def __init__(self, address: str, *, api_key: Optional[str] = None, timeout: Optional[float] = 10):
        super().__init__(grpc.aio.insecure_channel(address), api_key, timeout)

    async def __aenter__(self) -> "AsyncAdmin":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._channel.close()

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error

    async def drain(self) -> int:
        return (await self._call(self._drain, pb.DrainRequest())).calls

    async def state(self) -> pb.GetStateResponse:
        return await self._call(self._get_state, pb.GetStateRequest())

    async def set_log_level(self, level: str) -> str:
        return (await self._call(self._set_log_level, pb.SetLogLevelRequest(level=level))).previous_level
