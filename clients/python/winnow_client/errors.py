"""What a server's refusal says, and when to try again."""
import dataclasses
import random
from typing import List, Optional, Tuple

import grpc

from . import winnow_errors_pb2 as details_pb2


class WinnowError(Exception):
    """A call that failed.

    code: the gRPC status. reason: the server's word for it ("QUEUE_FULL", "INVALID_FIELD"; proto/winnow/v1/inference.proto lists
    them), "" where no server answered. retry_after: seconds, where the server says. violations: fields and what is wrong with them.
    """

    def __init__(self, code: grpc.StatusCode, message: str, reason: str = "", retry_after: Optional[float] = None,
                 violations: Optional[List[Tuple[str, str]]] = None):
        super().__init__(f"{code.name}{' ' + reason if reason else ''}: {message}")
        self.code, self.message, self.reason = code, message, reason
        self.retry_after, self.violations = retry_after, violations or []


def from_rpc(error: grpc.RpcError) -> WinnowError:
    reason, retry_after, violations = "", None, []
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in details_pb2.RpcStatus.FromString(value).details:
            kind = detail.type_url.rpartition("/")[2]
            if kind == "google.rpc.ErrorInfo":
                reason = details_pb2.ErrorInfo.FromString(detail.value).reason
            elif kind == "google.rpc.RetryInfo":
                delay = details_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry_after = delay.seconds + delay.nanos * 1e-9
            elif kind == "google.rpc.BadRequest":
                violations = [(v.field, v.description) for v in details_pb2.BadRequest.FromString(detail.value).field_violations]
    return WinnowError(error.code(), error.details() or "", reason, retry_after, violations)


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """Which failures are tried again, and when. Never after a token came: what was said cannot be taken back.

    Tried again are UNAVAILABLE (no server, or one that goes away) and RESOURCE_EXHAUSTED that says when to come back. A pause is what the
    server asks for, or else `first_pause` doubled with every attempt up to `longest_pause`; both with up to a quarter more, so that clients
    that were refused together do not come back together.
    """
    attempts: int = 5
    first_pause: float = 0.2
    longest_pause: float = 10.0

    def pause(self, error: WinnowError, attempt: int) -> Optional[float]:
        """Seconds to wait after the failure of `attempt` (1 is the first); None: the error is the caller's."""
        if attempt >= self.attempts:
            return None
        if error.code == grpc.StatusCode.UNAVAILABLE:
            pause = self.first_pause * 2 ** (attempt - 1) if error.retry_after is None else error.retry_after
        elif error.code == grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after is not None:
            pause = error.retry_after
        else:
            return None
        return min(pause, self.longest_pause) * random.uniform(1, 1.25)


NO_RETRIES = RetryPolicy(attempts=1)
