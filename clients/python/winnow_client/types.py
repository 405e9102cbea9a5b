"""Requests and answers as plain Python."""
import dataclasses
from typing import Any, List, Optional, Sequence, Tuple, Union

from . import winnow_inference_pb2 as pb

Prompt = Union[str, Sequence[int], None]
Messages = Optional[Sequence[Union[Tuple[str, str], dict]]]


@dataclasses.dataclass
class TokenPiece:
    id: int
    logprob: Optional[float] = None
    top: List[Tuple[int, float, str]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class PromptToken(TokenPiece):
    """A token of the prompt under `prompt_logprobs`; the first has no log-probability, and rank 0."""
    rank: int = 0


@dataclasses.dataclass
class Piece:
    """What came since the last piece of a choice. `finish` and `usage` are those of its last one."""
    choice: int
    text: str
    tokens: List[TokenPiece]
    finish: Optional[str] = None  # "STOP_TOKEN", "STOP_STRING", "MAX_TOKENS"
    usage: Optional[pb.Usage] = None
    prompt_tokens: List[PromptToken] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Choice:
    text: str = ""
    tokens: List[TokenPiece] = dataclasses.field(default_factory=list)
    finish: Optional[str] = None
    usage: Optional[pb.Usage] = None


@dataclasses.dataclass
class Answer:
    choices: List[Choice]
    prompt_tokens: List[PromptToken] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def usage(self) -> Optional[pb.Usage]:
        return self.choices[0].usage

    def add(self, piece: Piece) -> None:
        self.prompt_tokens += piece.prompt_tokens
        choice = self.choices[piece.choice]
        choice.text += piece.text
        choice.tokens += piece.tokens
        choice.finish = piece.finish or choice.finish
        choice.usage = piece.usage or choice.usage


_SAMPLING = {field.name for field in pb.SamplingOptions.DESCRIPTOR.fields}
_STOPPING = {field.name for field in pb.StoppingOptions.DESCRIPTOR.fields}
_OTHERS = {"n", "top_logprobs", "prompt_logprobs", "policy", "exactness", "show_special_tokens"}
_CACHE = {"cache_" + field.name: field.name for field in pb.CacheOptions.DESCRIPTOR.fields}


def set_prompt(request: Any, prompt: Prompt, messages: Messages) -> None:
    """The one of text, token ids and chat that is given."""
    if (prompt is None) == (messages is None):
        raise TypeError("give a prompt or messages, and not both")
    if messages is not None:
        for message in messages:
            role, content = (message["role"], message["content"]) if isinstance(message, dict) else message
            request.chat.messages.add(role=role, content=content)
    elif isinstance(prompt, str):
        request.text.text = prompt
    else:
        request.tokens.ids.extend(prompt)
        request.tokens.SetInParent()


def make_request(prompt: Prompt, messages: Messages, options: dict) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    set_prompt(request, prompt, messages)
    for name, value in options.items():
        if value is None:
            continue
        if name in _CACHE:
            setattr(request.cache, _CACHE[name], value)
            continue
        target = (request.sampling if name in _SAMPLING else request.stopping if name in _STOPPING else
                  request if name in _OTHERS else None)
        if target is None:
            raise TypeError(f"there is no option {name}")
        if name == "logit_bias":
            target.logit_bias.update(value)
        elif name in ("stop_strings", "stop_token_ids"):
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return request


def _rated(token: Any) -> tuple:
    return (token.id, token.logprob if token.HasField("logprob") else None,
            [(top.id, top.logprob, top.text) for top in token.top])


def to_piece(message: pb.GenerateResponse) -> Piece:
    piece = Piece(message.choice, message.text, [TokenPiece(*_rated(token)) for token in message.tokens],
                  prompt_tokens=[PromptToken(*_rated(token), token.rank) for token in message.prompt_tokens])
    if message.HasField("finish"):
        piece.finish = pb.FinishReason.Name(message.finish.reason).replace("FINISH_REASON_", "")
        piece.usage = message.finish.usage
    return piece
