#include "engine/schedule/answer.h"

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/engine/engine_testing.h"

namespace winnow::engine {
namespace {

int32_t Id(std::string_view token) {
  const std::optional<int32_t> id = TestTokenizer().TokenToId(token);
  EXPECT_TRUE(id.has_value()) << token;
  return id.value_or(0);
}

// The two bytes of "é", as the tokenizer writes bytes.
int32_t FirstHalf() { return Id("\u00c3"); }
int32_t SecondHalf() { return Id("\u00a9"); }

class AnswerTest : public testing::Test {
 protected:
  AnswerTest() { request_.stopping.max_tokens = 100; }

  FinishReason Add(int32_t id) { return answer().Add({.token = id, .logprob = 0, .top = {}}); }
  FinishReason Add(std::string_view token) { return Add(Id(token)); }
  OutputEvent Take() {
    OutputEvent event;
    answer().TakeInto(&event);
    return event;
  }
  Answer& answer() {
    if (!answer_) answer_ = std::make_unique<Answer>(request_, TestTokenizer());
    return *answer_;
  }

  Request request_;  // to be changed before the first Add
  std::unique_ptr<Answer> answer_;
};

std::vector<int32_t> Ids(const OutputEvent& event) {
  std::vector<int32_t> ids;
  for (const OutputToken& token : event.tokens) ids.push_back(token.token);
  return ids;
}

TEST_F(AnswerTest, ATokenComesWithItsText) {
  EXPECT_EQ(Add("h"), FinishReason::kNone);
  ASSERT_TRUE(answer().has_news());
  const OutputEvent event = Take();
  EXPECT_EQ(event.text, "h");
  EXPECT_EQ(Ids(event), std::vector<int32_t>{Id("h")});
  EXPECT_FALSE(answer().has_news());
}

TEST_F(AnswerTest, HalfACharacterIsNotTold) {
  Add("h");
  Take();
  Add(FirstHalf());
  const OutputEvent half = Take();
  EXPECT_EQ(half.text, "");
  EXPECT_EQ(Ids(half), std::vector<int32_t>{FirstHalf()});
  Add(SecondHalf());
  EXPECT_EQ(Take().text, "\u00e9");
}

TEST_F(AnswerTest, AnEndInsideACharacterTellsAReplacement) {
  request_.stopping.max_tokens = 1;
  EXPECT_EQ(Add(FirstHalf()), FinishReason::kMaxTokens);
  EXPECT_EQ(Take().text, "\uFFFD");
}

TEST_F(AnswerTest, TokensOfAPossibleStopStringWaitWithItsText) {
  request_.stopping.stop_strings = {"ab"};
  Add("x");
  Add("a");
  const OutputEvent first = Take();
  EXPECT_EQ(first.text, "x");
  EXPECT_EQ(Ids(first), std::vector<int32_t>{Id("x")});
  EXPECT_FALSE(answer().has_news());
  Add("c");
  const OutputEvent second = Take();
  EXPECT_EQ(second.text, "ac");
  EXPECT_EQ(Ids(second), (std::vector<int32_t>{Id("a"), Id("c")}));
}

TEST_F(AnswerTest, AStopStringEndsAndEveryTokenIsTold) {
  request_.stopping.stop_strings = {"zz", "ab"};
  Add("x");
  Add("a");
  EXPECT_EQ(Add("b"), FinishReason::kStopString);
  const OutputEvent event = Take();
  EXPECT_EQ(event.text, "x");
  EXPECT_EQ(event.stop_match, "ab");
  EXPECT_EQ(event.tokens.size(), 3u);
}

TEST_F(AnswerTest, IncludeStopKeepsTheStopString) {
  request_.stopping.stop_strings = {"ab"};
  request_.stopping.include_stop = true;
  Add("x");
  Add("a");
  Add("b");
  EXPECT_EQ(Take().text, "xab");
}

TEST_F(AnswerTest, AStopStringWinsOverMaxTokens) {
  request_.stopping.stop_strings = {"b"};
  request_.stopping.max_tokens = 2;
  Add("a");
  EXPECT_EQ(Add("b"), FinishReason::kStopString);
}

TEST_F(AnswerTest, AStopTokensTextIsLeftOutUnlessAskedFor) {
  request_.stopping.stop_token_ids = {Id("!")};
  Add("a");
  EXPECT_EQ(Add("!"), FinishReason::kStopToken);
  const OutputEvent event = Take();
  EXPECT_EQ(event.text, "a");
  EXPECT_EQ(event.tokens.size(), 2u);

  answer_.reset();
  request_.stopping.include_stop = true;
  Add("a");
  EXPECT_EQ(Add("!"), FinishReason::kStopToken);
  EXPECT_EQ(Take().text, "a!");
}

TEST_F(AnswerTest, TheEndGivesWhatAStopStringHeldBack) {
  request_.stopping.stop_strings = {"abc"};
  request_.stopping.max_tokens = 2;
  Add("a");
  EXPECT_EQ(Add("b"), FinishReason::kMaxTokens);
  const OutputEvent event = Take();
  EXPECT_EQ(event.text, "ab");
  EXPECT_EQ(event.stop_match, "");
}

TEST_F(AnswerTest, ACutGivesWhatWasHeldBack) {
  request_.stopping.stop_strings = {"abc"};
  Add("a");
  answer().Cut();
  const OutputEvent event = Take();
  EXPECT_EQ(event.text, "a");
  EXPECT_EQ(event.tokens.size(), 1u);
}

TEST_F(AnswerTest, StopStringsDoNotCountBeforeMinTokens) {
  request_.stopping.stop_strings = {"a"};
  request_.stopping.min_tokens = 3;
  EXPECT_EQ(Add("a"), FinishReason::kNone);
  EXPECT_EQ(Add("a"), FinishReason::kNone);
  EXPECT_EQ(Take().text, "aa");
  EXPECT_EQ(Add("a"), FinishReason::kStopString);  // three tokens: enough
  EXPECT_EQ(Take().text, "");
}

TEST_F(AnswerTest, AHalfCharacterAtTheEndMayCompleteAStopString) {
  request_.stopping.stop_strings = {"\uFFFD"};
  request_.stopping.max_tokens = 2;
  Add("a");
  EXPECT_EQ(Add(FirstHalf()), FinishReason::kStopString);
  EXPECT_EQ(Take().text, "a");
}

TEST_F(AnswerTest, ATokenWithoutTextIsToldAtOnce) {
  Add(Id("<|end|>"));
  ASSERT_TRUE(answer().has_news());
  const OutputEvent event = Take();
  EXPECT_EQ(event.text, "");
  EXPECT_EQ(event.tokens.size(), 1u);
}

// A control token as it shows in an answer that has a message format.
std::string Marked(const std::string& token) { return kControlBegin + token + kControlEnd; }

class MessagesTest : public AnswerTest {
 protected:
  MessagesTest() {
    request_.message_format = std::make_shared<const MessageFormat>(
        MessageFormat{.header_begins = {Id("<|end|>")}, .header_ends = {Id("<|user|>")}});
  }
};

TEST_F(MessagesTest, ControlTokensShowMarkedAndTextThatReadsLikeOneDoesNot) {
  for (const char* const token : {"a", "<|user|>", "b", "<|pad|>", "<|end|>"}) Add(token);
  EXPECT_EQ(Take().text, "a" + Marked("<|user|>") + "b" + Marked("<|pad|>") + Marked("<|end|>"));
  for (const char* const token : {"<", "|", "e", "n", "d", "|", ">"}) Add(token);
  EXPECT_EQ(Take().text, "<|end|>");
  // Half a character ends where a control token comes.
  Add(FirstHalf());
  Add("<|user|>");
  Add(FirstHalf());
  Add(SecondHalf());
  EXPECT_EQ(Take().text, "\uFFFD" + Marked("<|user|>") + "\u00e9");
}

TEST_F(MessagesTest, StopStringsAreLookedForInTextsOfMessagesAlone) {
  request_.stopping.stop_strings = {"ab", "<|"};
  for (const char* const token : {"a", "b", "<|user|>", "b", "a"}) {
    EXPECT_EQ(Add(token), FinishReason::kNone) << token;
  }
  const OutputEvent first = Take();
  EXPECT_EQ(first.text, "ab" + Marked("<|user|>") + "b");
  EXPECT_EQ(first.tokens.size(), 4u) << "the last one may begin a stop string";
  // None goes on from one text into the next, or over a header.
  for (const char* const token :
       {"<|pad|>", "b", "a", "<|end|>", "b", "a", "b", "<|user|>", "b", "a"}) {
    EXPECT_EQ(Add(token), FinishReason::kNone) << token;
  }
  EXPECT_EQ(Take().text,
            "a" + Marked("<|pad|>") + "ba" + Marked("<|end|>") + "bab" + Marked("<|user|>") + "b");
  EXPECT_EQ(Add("b"), FinishReason::kStopString);
  const OutputEvent last = Take();
  EXPECT_EQ(last.text, "");
  EXPECT_EQ(last.stop_match, "ab");
}

TEST_F(MessagesTest, AStopTokensTextIsLeftOut) {
  request_.stopping.stop_token_ids = {Id("<|end|>")};
  Add("<|user|>");
  EXPECT_EQ(Add("<|end|>"), FinishReason::kStopToken);
  EXPECT_EQ(Take().text, Marked("<|user|>"));
}

// Only whole characters: no continuation byte first, and no lead byte without all of its own.
bool IsWholeCharacters(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    if (lead >= 0x80 && lead < 0xC0) return false;
    size_t end = i + (lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4);
    if (end > text.size()) return false;
    for (++i; i < end; ++i) {
      if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) return false;
    }
  }
  return true;
}

TEST_F(AnswerTest, EventsJoinedAreTheWholeAnswer) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::vector<int32_t> ids(1 + random() % 60);
    for (int32_t& id : ids) {
      id = static_cast<int32_t>(random() % (random() % 2 == 0 ? 264 : 4096));
    }
    Request request;
    request.stopping.max_tokens = static_cast<int32_t>(ids.size());
    request.stopping.stop_strings = {"never to be seen", "\u00e9\u00e9\u00e9\u00e9"};
    request.skip_special_tokens = seed % 2 == 0;
    Answer answer(request, TestTokenizer());
    std::string text;
    std::vector<int32_t> told;
    for (const int32_t id : ids) {
      const FinishReason reason = answer.Add({.token = id, .logprob = 0, .top = {}});
      EXPECT_EQ(reason == FinishReason::kMaxTokens,
                id == ids.back() && answer.num_tokens() == static_cast<int32_t>(ids.size()));
      OutputEvent event;
      answer.TakeInto(&event);
      EXPECT_TRUE(IsWholeCharacters(event.text));
      text += event.text;
      for (const OutputToken& token : event.tokens) told.push_back(token.token);
    }
    EXPECT_EQ(told, ids);
    EXPECT_EQ(text, TestTokenizer().Decode(ids, request.skip_special_tokens));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace winnow::engine
