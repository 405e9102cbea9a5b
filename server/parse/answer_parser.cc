#include "server/parse/answer_parser.h"

#include <algorithm>
#include <array>
#include <utility>

#include "server/parse/json_call.h"

namespace winnow::server {
namespace {

using Kind = AnswerPiece::Kind;
using Pieces = std::vector<AnswerPiece>;

constexpr std::string_view kSpaces = " \t\r\n";

bool IsSpace(char c) { return kSpaces.find(c) != kSpaces.npos; }

// Joined with the last piece where that is of the same kind.
void AddText(Kind kind, std::string_view text, Pieces& out) {
  if (text.empty()) return;
  if (!out.empty() && out.back().kind == kind) {
    out.back().text += text;
  } else {
    out.push_back({kind, std::string(text)});
  }
}

// Text up to a marker. White space before the marker goes with it, so it is held back, and so is what may be the
// marker's beginning.
class UntilMarker {
 public:
  explicit UntilMarker(std::string_view marker) : marker_(marker) {}

  // Takes of `text` what it needs; true: the marker is complete, and `text` begins behind it. Text that is certain is
  // given as `kind`.
  bool Add(std::string_view& text, Kind kind, Pieces& out) {
    held_ += text;
    if (const size_t at = held_.find(marker_); at != held_.npos) {
      const size_t behind = at + marker_.size();
      text.remove_prefix(text.size() - (held_.size() - behind));
      const std::string_view before = WithoutSpace(std::string_view(held_).substr(0, at));
      AddText(kind, before, out);
      found_ = held_.substr(before.size(), behind - before.size());
      held_.clear();
      return true;
    }
    text = {};
    const size_t certain =
        WithoutSpace(std::string_view(held_).substr(0, held_.size() - PossibleMarker())).size();
    AddText(kind, std::string_view(held_).substr(0, certain), out);
    held_.erase(0, certain);
    return false;
  }
  void Finish(Kind kind, Pieces& out) {
    AddText(kind, held_, out);
    held_.clear();
  }
  // The marker and the space before it; after it was found.
  const std::string& found() const { return found_; }

 private:
  static std::string_view WithoutSpace(std::string_view text) {
    const size_t last = text.find_last_not_of(kSpaces);
    return text.substr(0, last == text.npos ? 0 : last + 1);
  }
  // Bytes at the end of held_ that may be the marker's beginning.
  size_t PossibleMarker() const {
    for (size_t size = std::min(held_.size(), marker_.size() - 1); size > 0; --size) {
      if (std::string_view(held_).ends_with(marker_.substr(0, size))) return size;
    }
    return 0;
  }

  const std::string_view marker_;
  std::string held_, found_;
};

class PlainParser final : public AnswerParser {
 public:
  void Add(std::string_view text, Pieces& out) override { AddText(Kind::kContent, text, out); }
  void Finish(Pieces&) override {}
};

// One call after the other; what both of a kind of parser do with JsonCall.
class CallReader {
 public:
  // One of `names`, if there are some; else any.
  explicit CallReader(std::vector<std::string> names) : names_(std::move(names)) {}

  enum class State { kOpen, kDone, kBroken };
  // Takes of `text` what belongs to the call. kBroken: it was none; if the client has not heard of it yet, its text is
  // content.
  State Add(std::string_view& text, Pieces& out) {
    while (!text.empty()) {
      const JsonCall::State state = call_.Add(text.front());
      text.remove_prefix(1);
      if (state == JsonCall::State::kBroken) {
        return Break(out);
      }
      if (call_.has_name() && !begun_) {
        if (!names_.empty() &&
            std::find(names_.begin(), names_.end(), call_.name()) == names_.end()) {
          return Break(out);
        }
        begun_ = true;
        out.push_back({Kind::kCallBegin, call_.name()});
      }
      if (state == JsonCall::State::kDone) {
        AddText(Kind::kCallArguments, call_.TakeArguments(), out);
        out.push_back({Kind::kCallEnd, ""});
        Reset();
        return State::kDone;
      }
    }
    AddText(Kind::kCallArguments, call_.TakeArguments(), out);
    return State::kOpen;
  }
  // Behind a member's value: all but the object's brace may be there.
  bool at_member_end() const { return call_.at_member_end(); }
  // The answer has ended in its midst. `before`: what stood before it, for content.
  void Finish(std::string_view before, Pieces& out) {
    AddText(Kind::kCallArguments, call_.TakeArguments(), out);
    if (begun_) {
      out.push_back({Kind::kCallEnd, ""});
    } else {
      AddText(Kind::kContent, before, out);
      AddText(Kind::kContent, call_.text(), out);
    }
    Reset();
  }
  // After kBroken: text that was taken for a call and is none becomes content, behind what led to it. Nothing where the
  // client has heard of the call.
  void GiveBack(const std::string& before, Pieces& out) {
    if (const std::string broken = std::exchange(broken_, {}); !broken.empty()) {
      AddText(Kind::kContent, before + broken, out);
    }
  }

 private:
  State Break(Pieces& out) {
    AddText(Kind::kCallArguments, call_.TakeArguments(), out);
    if (begun_) {
      out.push_back({Kind::kCallEnd, ""});
    } else {
      broken_ = call_.text();
    }
    Reset();
    return State::kBroken;
  }
  void Reset() {
    call_ = JsonCall();
    begun_ = false;
  }

  const std::vector<std::string> names_;
  JsonCall call_;
  bool begun_ = false;
  std::string broken_;
};

class HermesParser final : public AnswerParser {
 public:
  void Add(std::string_view text, Pieces& out) override {
    while (!text.empty()) {
      switch (place_) {
        case Place::kContent:
          if (content_.Add(text, Kind::kContent, out)) place_ = Place::kCall;
          break;
        case Place::kCall:
          switch (call_.Add(text, out)) {
            case CallReader::State::kOpen:
              break;
            case CallReader::State::kDone:
              place_ = Place::kAfterCall;
              break;
            case CallReader::State::kBroken:
              call_.GiveBack(content_.found(), out);
              place_ = Place::kContent;
          }
          break;
        case Place::kAfterCall:
          // Nobody needs text between a call and its end marker.
          if (end_.Add(text, Kind::kContent, skipped_)) place_ = Place::kBetween;
          skipped_.clear();
          break;
        case Place::kBetween: {
          // White space behind a call leads to the next one.
          const size_t first = text.find_first_not_of(kSpaces);
          text.remove_prefix(first == text.npos ? text.size() : first);
          if (!text.empty()) place_ = Place::kContent;
        }
      }
    }
  }
  void Finish(Pieces& out) override {
    if (place_ == Place::kContent) content_.Finish(Kind::kContent, out);
    if (place_ == Place::kCall) call_.Finish(content_.found(), out);
  }

 private:
  enum class Place { kContent, kCall, kAfterCall, kBetween };
  static constexpr std::string_view kBegin = "<tool_call>", kEnd = "</tool_call>";
  Place place_ = Place::kContent;
  UntilMarker content_{kBegin}, end_{kEnd};
  CallReader call_{{}};
  Pieces skipped_;
};

class Llama3Parser final : public AnswerParser {
 public:
  explicit Llama3Parser(std::vector<std::string> names) : call_(std::move(names)) {}

  void Add(std::string_view text, Pieces& out) override {
    while (!text.empty()) {
      switch (place_) {
        case Place::kBegin:
          AddBeginning(text);
          break;
        case Place::kCall:
          switch (call_.Add(text, out)) {
            case CallReader::State::kOpen:
              break;
            case CallReader::State::kDone:
              place_ = Place::kBetween;
              break;
            case CallReader::State::kBroken:
              call_.GiveBack(before_, out);
              before_.clear();
              place_ = Place::kContent;
          }
          break;
        case Place::kBetween: {
          const size_t first = text.find_first_not_of(" \t\r\n;");
          text.remove_prefix(first == text.npos ? text.size() : first);
          if (!text.empty()) {
            before_.clear();
            place_ = text.front() == '{' ? Place::kCall : Place::kContent;
          }
          break;
        }
        case Place::kContent:
          AddText(Kind::kContent, before_ + std::string(text), out);
          before_.clear();
          text = {};
      }
    }
  }
  void Finish(Pieces& out) override {
    if (place_ == Place::kCall) {
      call_.Finish(before_, out);
    } else {
      AddText(Kind::kContent, before_, out);
    }
    before_.clear();
  }

 private:
  enum class Place { kBegin, kCall, kBetween, kContent };
  static constexpr std::string_view kTag = "<|python_tag|>";

  // White space, the tag, and the object's brace decide.
  void AddBeginning(std::string_view& text) {
    const char c = text.front();
    const std::string_view word = std::string_view(before_).substr(
        std::min(before_.find_first_not_of(kSpaces), before_.size()));
    if (c == '{' && (word.empty() || word == kTag)) {
      place_ = Place::kCall;
      return;
    }
    const bool goes_on = (word.empty() || word == kTag) && IsSpace(c);
    if (!goes_on &&
        !(word.size() < kTag.size() && kTag.starts_with(word) && kTag[word.size()] == c)) {
      place_ = Place::kContent;
      return;
    }
    // The tag's own white space is not content's, should there be any after all.
    before_.push_back(c);
    text.remove_prefix(1);
  }

  Place place_ = Place::kBegin;
  std::string before_;  // what may have to be content
  CallReader call_;
};

class MistralParser final : public AnswerParser {
 public:
  void Add(std::string_view text, Pieces& out) override {
    while (!text.empty()) {
      switch (place_) {
        case Place::kContent:
          if (content_.Add(text, Kind::kContent, out)) Begin();
          break;
        case Place::kAfterMarker:
          AddAfterMarker(text);
          break;
        case Place::kName:
          AddName(text, out);
          break;
        case Place::kCall:
          AddCall(text, out);
          break;
        case Place::kBetween:
          AddBetween(text);
      }
    }
  }
  void Finish(Pieces& out) override {
    if (place_ == Place::kContent) content_.Finish(Kind::kContent, out);
    if (place_ == Place::kAfterMarker || place_ == Place::kName)
      AddText(Kind::kContent, Raw(), out);
    if (place_ == Place::kCall) call_.Finish(named_ ? "" : Raw(), out);
  }

 private:
  enum class Place { kContent, kAfterMarker, kName, kCall, kBetween };
  static constexpr std::string_view kMarker = "[TOOL_CALLS]", kArguments = "[ARGS]";
  static constexpr size_t kMaxNameBytes = 256;

  void Begin() {
    place_ = Place::kAfterMarker;
    name_.clear();
    in_list_ = named_ = false;
  }
  std::string Raw() const { return content_.found() + (in_list_ ? "[" : "") + name_; }

  void AddAfterMarker(std::string_view& text) {
    const char c = text.front();
    if (c == '[') {
      in_list_ = true;
      place_ = Place::kCall;
    } else if (c == '{') {
      place_ = Place::kCall;
      return;
    } else if (!IsSpace(c)) {
      place_ = Place::kName;
      return;
    }
    text.remove_prefix(1);
  }

  // A name, the marker of arguments or none, and an object.
  void AddName(std::string_view& text, Pieces& out) {
    const char c = text.front();
    text.remove_prefix(1);
    if (c != '{') {
      name_.push_back(c);
      if (name_.size() > kMaxNameBytes) {
        AddText(Kind::kContent, Raw(), out);
        place_ = Place::kContent;
      }
      return;
    }
    std::string_view name = name_;
    if (const size_t at = name.find(kArguments); at != name.npos) name = name.substr(0, at);
    while (!name.empty() && IsSpace(name.back())) name.remove_suffix(1);
    named_ = true;
    // The rest is as in an object that has the name already.
    std::string head = R"({"name": ")";
    for (const char byte : name) {
      if (byte == '"' || byte == '\\') head.push_back('\\');
      if (static_cast<unsigned char>(byte) >= 0x20) head.push_back(byte);
    }
    head += R"(", "arguments": {)";
    std::string_view rest = head;
    call_.Add(rest, out);
    place_ = Place::kCall;
  }

  void AddCall(std::string_view& text, Pieces& out) {
    // A list may be empty, or end.
    if (in_list_ && text.front() == ']' && expects_call_) {
      text.remove_prefix(1);
      place_ = Place::kBetween;
      in_list_ = false;
      return;
    }
    expects_call_ = false;
    switch (named_ ? AddNamed(text, out) : call_.Add(text, out)) {
      case CallReader::State::kOpen:
        break;
      case CallReader::State::kDone:
        expects_call_ = true;
        place_ = Place::kBetween;
        break;
      case CallReader::State::kBroken:
        call_.GiveBack(Raw(), out);
        place_ = Place::kContent;
    }
  }

  // The object around name and arguments is not the model's, so it ends with the arguments.
  CallReader::State AddNamed(std::string_view& text, Pieces& out) {
    while (!text.empty()) {
      std::string_view byte = text.substr(0, 1);
      text.remove_prefix(1);
      CallReader::State state = call_.Add(byte, out);
      if (state == CallReader::State::kOpen && call_.at_member_end()) {
        byte = "}";
        state = call_.Add(byte, out);
      }
      if (state != CallReader::State::kOpen) return state;
    }
    return CallReader::State::kOpen;
  }

  void AddBetween(std::string_view& text) {
    const char c = text.front();
    if (IsSpace(c) || (in_list_ && c == ',')) {
      text.remove_prefix(1);
    } else if (in_list_ && c == ']') {
      text.remove_prefix(1);
      in_list_ = false;
    } else if (in_list_ && c == '{') {
      place_ = Place::kCall;
    } else {
      place_ = Place::kContent;
    }
  }

  Place place_ = Place::kContent;
  UntilMarker content_{kMarker};
  CallReader call_{{}};
  std::string name_;
  bool in_list_ = false, named_ = false, expects_call_ = true;
};

// Ends with the first call.
class OneCallParser final : public AnswerParser {
 public:
  explicit OneCallParser(std::unique_ptr<AnswerParser> rest) : rest_(std::move(rest)) {}
  void Add(std::string_view text, Pieces& out) override {
    if (ended_) return;
    Pieces pieces;
    rest_->Add(text, pieces);
    Pass(std::move(pieces), out);
  }
  void Finish(Pieces& out) override {
    if (ended_) return;
    Pieces pieces;
    rest_->Finish(pieces);
    Pass(std::move(pieces), out);
  }

 private:
  void Pass(Pieces pieces, Pieces& out) {
    for (AnswerPiece& piece : pieces) {
      if (ended_) return;
      ended_ = piece.kind == Kind::kCallEnd;
      out.push_back(std::move(piece));
    }
  }
  const std::unique_ptr<AnswerParser> rest_;
  bool ended_ = false;
};

class ReasoningParser final : public AnswerParser {
 public:
  ReasoningParser(bool in_reasoning, std::unique_ptr<AnswerParser> rest)
      : place_(in_reasoning ? Place::kInside : Place::kBegin), rest_(std::move(rest)) {}

  void Add(std::string_view text, Pieces& out) override {
    while (!text.empty()) {
      switch (place_) {
        case Place::kBegin:
          AddBeginning(text);
          break;
        case Place::kInside: {
          if (!begun_) SkipSpace(text);
          if (text.empty()) break;
          begun_ = true;
          if (end_.Add(text, Kind::kReasoning, out)) place_ = Place::kAfter;
          break;
        }
        case Place::kAfter:
          SkipSpace(text);
          if (!text.empty()) place_ = Place::kRest;
          break;
        case Place::kRest:
          if (!before_.empty()) rest_->Add(std::exchange(before_, {}), out);
          rest_->Add(text, out);
          text = {};
      }
    }
  }
  void Finish(Pieces& out) override {
    if (place_ == Place::kInside) end_.Finish(Kind::kReasoning, out);
    if (!before_.empty()) rest_->Add(std::exchange(before_, {}), out);
    rest_->Finish(out);
  }

 private:
  enum class Place { kBegin, kInside, kAfter, kRest };
  static constexpr std::string_view kBegin = "<think>", kEnd = "</think>";

  static void SkipSpace(std::string_view& text) {
    const size_t first = text.find_first_not_of(kSpaces);
    text.remove_prefix(first == text.npos ? text.size() : first);
  }

  // White space and the marker, or it is no reasoning.
  void AddBeginning(std::string_view& text) {
    const char c = text.front();
    const std::string_view word = std::string_view(before_).substr(
        std::min(before_.find_first_not_of(kSpaces), before_.size()));
    if (!(word.empty() && IsSpace(c)) && kBegin[word.size()] != c) {
      place_ = Place::kRest;
      return;
    }
    before_.push_back(c);
    text.remove_prefix(1);
    if (before_.ends_with(kBegin)) {
      before_.clear();
      place_ = Place::kInside;
    }
  }

  Place place_;
  std::string before_;
  bool begun_ = false;
  UntilMarker end_{kEnd};
  const std::unique_ptr<AnswerParser> rest_;
};

// Messages of OpenAI's Harmony format, each a header and a text:
//
//   <|start|> role [to=recipient] <|channel|> channel [to=recipient] [<|constrain|> type] <|message|> text <|end|>
//
// The prompt ends with "<|start|>assistant", so an answer begins in a header. Models leave parts out, and repeat them;
// what is text and what a header is decided by the markers that stand around it, so that no text is lost:
//
//   <|start|>, <|channel|> inside a text           the message ends there
//   <|message|> without a channel                  text of the final channel
//   a text that no <|channel|> or <|message|> follows   content, unless it is what a header begins with
//   a header longer than kMaxHeaderBytes           no header: content
//
// Destinations:
//
//   the channel analysis                           reasoning
//   any other channel                              content: final, and commentary, which is a preamble for the user
//   to=functions.NAME, on whatever channel         a call
//   to=NAME of a function that was offered         a call: models leave the namespace out
//   any other recipient, or no call may be told    reasoning. Models are trained to call browser and python, which belong
//                                                  to their chain of thought, and do so unasked: the client knows no such
//                                                  function, and its user should not read the query as an answer
//   another role than the assistant's              reasoning: a turn of the tool's or the user's that the model made up
class HarmonyParser final : public AnswerParser {
 public:
  explicit HarmonyParser(AnswerParserOptions options) : options_(std::move(options)) {}

  void Add(std::string_view text, Pieces& out) override {
    while (!text.empty()) {
      const size_t size = text.find(in_marker_ ? kMarkerEnd : kMarkerBegin);
      const std::string_view part = text.substr(0, size);
      if (in_marker_) {
        marker_ += part.substr(0, kMaxMarkerBytes - std::min(kMaxMarkerBytes, marker_.size()));
      } else {
        AddText(part, out);
      }
      if (size == text.npos) return;
      text.remove_prefix(size + 1);
      in_marker_ = !in_marker_;
      if (!in_marker_) TakeMarker(std::exchange(marker_, {}), out);
    }
  }
  void Finish(Pieces& out) override {
    if (place_ == Place::kText && kind_ == Kind::kCallArguments)
      out.push_back({Kind::kCallEnd, ""});
    if (place_ == Place::kOutside) GiveBack(out);
  }

 private:
  enum class Place {
    kOutside,  // before a header's first marker: the role, or text that stands in no message
    kHeader,
    kText,
  };
  // Longer than any marker; one that is cut here is none of the format's.
  static constexpr size_t kMaxMarkerBytes = 256;
  static constexpr size_t kMaxHeaderBytes = 512;

  // Part of a header: a name, and a recipient.
  struct Words {
    std::string_view name, recipient;
  };
  static Words WordsOf(std::string_view part) {
    constexpr std::string_view kTo = "to=";
    Words words;
    while (true) {
      const size_t first = part.find_first_not_of(kSpaces);
      if (first == part.npos) return words;
      part.remove_prefix(first);
      const std::string_view word = part.substr(0, part.find_first_of(kSpaces));
      part.remove_prefix(word.size());
      // The space before it is left out at times.
      const size_t to = word.find(kTo);
      if (words.name.empty()) words.name = word.substr(0, to);
      if (to != word.npos) words.recipient = word.substr(to + kTo.size());
    }
  }

  void AddText(std::string_view text, Pieces& out) {
    if (text.empty()) return;
    if (place_ == Place::kText) {
      Emit(text, out);
      return;
    }
    *part_ += text;
    if (role_.size() + channel_.size() + type_.size() > kMaxHeaderBytes) GiveBack(out);
  }

  void TakeMarker(const std::string& marker, Pieces& out) {
    if (marker == "<|start|>") {
      End(out);
      place_ = Place::kHeader;
    } else if (marker == "<|channel|>") {
      if (place_ == Place::kText) End(out);
      place_ = Place::kHeader;
      // The last one of two channels counts.
      channel_.clear();
      part_ = &channel_;
    } else if (marker == "<|constrain|>") {
      if (place_ == Place::kText) return;
      place_ = Place::kHeader;
      part_ = &type_;
    } else if (marker == "<|message|>") {
      if (place_ != Place::kText) Begin(out);
    } else if (marker == "<|end|>" || marker == "<|call|>" || marker == "<|return|>") {
      End(out);
    } else if (place_ == Place::kText && options_.shows_control_tokens) {
      Emit(marker, out);
    }
  }

  // The text of a message begins.
  void Begin(Pieces& out) {
    const Words role = WordsOf(role_), channel = WordsOf(channel_);
    std::string_view recipient;
    for (const std::string_view named :
         {role.recipient, channel.recipient, WordsOf(type_).recipient}) {
      if (!named.empty()) recipient = named;
    }
    // These hear all that is said.
    if (recipient == "all" || recipient == "user" || recipient == "assistant") recipient = {};
    const bool own = role.name.empty() || role.name == "assistant";
    const std::string_view function = own ? FunctionOf(recipient) : "";
    if (!function.empty()) {
      kind_ = Kind::kCallArguments;
      out.push_back({Kind::kCallBegin, std::string(function)});
    } else if (!own || !recipient.empty() || channel.name == "analysis") {
      kind_ = Kind::kReasoning;
    } else {
      kind_ = Kind::kContent;
    }
    place_ = Place::kText;
    begun_ = false;
    ForgetHeader();
  }

  // Name of the function that a recipient stands for; "": none that the client has.
  std::string_view FunctionOf(std::string_view recipient) const {
    constexpr std::string_view kNamespace = "functions.";
    if (options_.tools != ToolFormat::kHarmony) return "";
    if (recipient.starts_with(kNamespace)) return recipient.substr(kNamespace.size());
    const auto& names = options_.names;
    return std::find(names.begin(), names.end(), recipient) != names.end() ? recipient : "";
  }

  // Ends the message or call that is open.
  void End(Pieces& out) {
    if (place_ == Place::kText && kind_ == Kind::kCallArguments) {
      if (!begun_) out.push_back({Kind::kCallArguments, "{}"});
      out.push_back({Kind::kCallEnd, ""});
    }
    if (place_ == Place::kOutside) GiveBack(out);
    place_ = Place::kOutside;
    ForgetHeader();
  }

  // Text that was held for a header is none: it becomes content, unless it is nothing but the beginning of one.
  void GiveBack(Pieces& out) {
    const std::string held = role_ + channel_ + type_;
    const bool drops = held.size() <= kMaxHeaderBytes && BeginsHeader(role_);
    ForgetHeader();
    place_ = Place::kText;
    kind_ = Kind::kContent;
    begun_ = false;
    if (!drops) Emit(held, out);
  }

  // Whether a text is "assistant", "to=recipient", both or neither.
  static bool BeginsHeader(std::string_view text) {
    constexpr std::string_view kRole = "assistant";
    const auto skip = [&text](size_t size) { text.remove_prefix(std::min(size, text.size())); };
    skip(text.find_first_not_of(kSpaces));
    if (text.starts_with(kRole)) skip(kRole.size());
    skip(text.find_first_not_of(kSpaces));
    if (text.starts_with("to=")) skip(text.find_first_of(kSpaces));
    skip(text.find_first_not_of(kSpaces));
    return text.empty();
  }

  // Text of the message. Messages of one kind are paragraphs of one text.
  void Emit(std::string_view text, Pieces& out) {
    if (text.empty()) return;
    if (kind_ == Kind::kCallArguments) {
      if (!begun_) text.remove_prefix(std::min(text.find_first_not_of(kSpaces), text.size()));
    } else if (!begun_) {
      bool& said = kind_ == Kind::kContent ? said_ : thought_;
      if (std::exchange(said, true)) winnow::server::AddText(kind_, "\n\n", out);
    }
    begun_ |= !text.empty();
    winnow::server::AddText(kind_, text, out);
  }

  void ForgetHeader() {
    role_.clear();
    channel_.clear();
    type_.clear();
    part_ = &role_;
  }

  const AnswerParserOptions options_;
  Place place_ = Place::kOutside;
  bool in_marker_ = false;
  std::string marker_;
  std::string role_, channel_, type_;    // of the header
  std::string* part_ = &role_;           // which of them goes on
  Kind kind_ = Kind::kContent;           // of the message's text
  bool begun_ = false;                   // the message has some text
  bool said_ = false, thought_ = false;  // some message had content, or reasoning
};

constexpr std::array<std::pair<ToolFormat, std::string_view>, 5> kNames = {{
    {ToolFormat::kNone, "none"},
    {ToolFormat::kHermes, "hermes"},
    {ToolFormat::kLlama3, "llama3_json"},
    {ToolFormat::kMistral, "mistral"},
    {ToolFormat::kHarmony, "harmony"},
}};

}  // namespace

std::unique_ptr<AnswerParser> MakeAnswerParser(const AnswerParserOptions& options) {
  std::unique_ptr<AnswerParser> parser;
  switch (options.reasoning == ReasoningFormat::kHarmony ? ToolFormat::kHarmony : options.tools) {
    case ToolFormat::kNone:
      parser = std::make_unique<PlainParser>();
      break;
    case ToolFormat::kHermes:
      parser = std::make_unique<HermesParser>();
      break;
    case ToolFormat::kLlama3:
      parser = std::make_unique<Llama3Parser>(options.names);
      break;
    case ToolFormat::kMistral:
      parser = std::make_unique<MistralParser>();
      break;
    case ToolFormat::kHarmony:
      parser = std::make_unique<HarmonyParser>(options);
      break;
  }
  if (options.one_call) parser = std::make_unique<OneCallParser>(std::move(parser));
  if (options.reasoning != ReasoningFormat::kThink) return parser;
  return std::make_unique<ReasoningParser>(options.in_reasoning, std::move(parser));
}

std::string_view ToolFormatName(ToolFormat format) {
  for (const auto& [known, name] : kNames) {
    if (known == format) return name;
  }
  return "";
}

std::optional<ToolFormat> ToolFormatOf(std::string_view name) {
  for (const auto& [format, known] : kNames) {
    if (known == name) return format;
  }
  return std::nullopt;
}

}  // namespace winnow::server
