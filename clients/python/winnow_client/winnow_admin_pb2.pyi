from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ["calls"]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: int
    def __init__(self, calls: _Optional[int] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ["calls", "draining", "failed", "heartbeat_age_seconds", "kv_blocks", "kv_blocks_idle", "kv_blocks_used", "log_level", "model", "named_prefixes", "paused", "pinned_prefixes", "running", "store", "uptime_seconds", "version", "waiting", "waiting_tokens"]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_IDLE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    PINNED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    calls: int
    draining: bool
    failed: bool
    heartbeat_age_seconds: float
    kv_blocks: int
    kv_blocks_idle: int
    kv_blocks_used: int
    log_level: str
    model: str
    named_prefixes: int
    paused: int
    pinned_prefixes: int
    running: int
    store: StoreState
    uptime_seconds: float
    version: str
    waiting: int
    waiting_tokens: int
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., draining: bool = ..., failed: bool = ..., heartbeat_age_seconds: _Optional[float] = ..., calls: _Optional[int] = ..., running: _Optional[int] = ..., paused: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_idle: _Optional[int] = ..., store: _Optional[_Union[StoreState, _Mapping]] = ..., named_prefixes: _Optional[int] = ..., pinned_prefixes: _Optional[int] = ..., log_level: _Optional[str] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ["level"]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ["previous_level"]
    PREVIOUS_LEVEL_FIELD_NUMBER: _ClassVar[int]
    previous_level: str
    def __init__(self, previous_level: _Optional[str] = ...) -> None: ...

class StoreState(_message.Message):
    __slots__ = ["blocks", "capacity_bytes", "pinned_bytes", "state", "used_bytes"]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    capacity_bytes: int
    pinned_bytes: int
    state: str
    used_bytes: int
    def __init__(self, state: _Optional[str] = ..., blocks: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ...) -> None: ...
