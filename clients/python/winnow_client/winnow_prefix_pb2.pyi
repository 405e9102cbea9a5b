from . import winnow_inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeletePrefixRequest(_message.Message):
    __slots__ = ["name"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeletePrefixResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class ListPrefixesRequest(_message.Message):
    __slots__ = ["name"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListPrefixesResponse(_message.Message):
    __slots__ = ["prefixes"]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[Prefix]
    def __init__(self, prefixes: _Optional[_Iterable[_Union[Prefix, _Mapping]]] = ...) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ["name", "pinned", "ttl_seconds"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pinned: bool
    ttl_seconds: int
    def __init__(self, name: _Optional[str] = ..., pinned: bool = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ["prefix"]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ["blocks", "expires_in_seconds", "fast_blocks", "name", "pinned", "pinned_blocks", "stored_blocks", "tokens"]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    expires_in_seconds: float
    fast_blocks: int
    name: str
    pinned: bool
    pinned_blocks: int
    stored_blocks: int
    tokens: int
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., fast_blocks: _Optional[int] = ..., stored_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., pinned: bool = ..., expires_in_seconds: _Optional[float] = ...) -> None: ...

class PutPrefixRequest(_message.Message):
    __slots__ = ["chat", "name", "pinned", "text", "tokens", "ttl_seconds"]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    chat: _inference_pb2.ChatPrompt
    name: str
    pinned: bool
    text: _inference_pb2.TextPrompt
    tokens: _inference_pb2.TokenPrompt
    ttl_seconds: int
    def __init__(self, name: _Optional[str] = ..., text: _Optional[_Union[_inference_pb2.TextPrompt, _Mapping]] = ..., tokens: _Optional[_Union[_inference_pb2.TokenPrompt, _Mapping]] = ..., chat: _Optional[_Union[_inference_pb2.ChatPrompt, _Mapping]] = ..., pinned: bool = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class PutPrefixResponse(_message.Message):
    __slots__ = ["prefix", "usage"]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    usage: _inference_pb2.Usage
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ...) -> None: ...
