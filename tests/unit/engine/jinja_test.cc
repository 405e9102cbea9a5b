// The template language: equal to Python's jinja2 on small templates of every feature, marks that
// survive every operation, and limits under hostile templates.
#include <sys/resource.h>

#include <chrono>
#include <thread>

#include "engine/base/concat.h"
#include "engine/text/chat_template.h"
#include "tests/unit/engine/tokenizer_testing.h"

namespace winnow::engine {
namespace {

using Json = nlohmann::ordered_json;

const Json& OneMessage() {
  static const auto* messages = new Json(Json::parse(R"([{"role":"user","content":"x"}])"));
  return *messages;
}

absl::StatusOr<ChatTemplate::Rendered> Render(std::string_view text, const Json& variables,
                                              const jinja::Limits& limits = jinja::Limits()) {
  ChatRequest request;
  request.messages = &OneMessage();
  request.kwargs = &variables;
  request.now = absl::CivilSecond(2025, 2, 1, 12, 30, 5);
  return ChatTemplate::FromText(text, "", "").Render(request, limits);
}

// tests/golden/jinja.json is what Python's jinja2 renders; tests/differential/make_jinja_goldens.py
// writes it.
TEST(Jinja, RendersWhatPythonRenders) {
  std::ifstream file(SourcePath("tests/golden/jinja.json"));
  const Json golden = Json::parse(file, nullptr, false);
  ASSERT_GT(golden["cases"].size(), 200u);
  for (const Json& item : golden["cases"]) {
    const std::string text = item[0];
    const auto rendered = Render(text, golden["context"]);
    if (item[1].is_null()) {
      EXPECT_FALSE(rendered.ok()) << text << "\n" << rendered->text;
    } else {
      ASSERT_TRUE(rendered.ok()) << text << "\n" << rendered.status();
      EXPECT_EQ(rendered->text, item[1].get<std::string>()) << text;
    }
  }
}

TEST(Jinja, ErrorsNameTheLine) {
  const auto message = [](std::string_view text) {
    return Render(text, Json::object()).status().ToString();
  };
  EXPECT_NE(message("a\n{{ b }}\n{% for %}").find("line 3"), std::string::npos);
  EXPECT_NE(message("a\n\n{# no end").find("line 3"), std::string::npos);
  EXPECT_NE(message("{% if 1 %}\n{{ '\n' ~ \n\n 1 / 0 }}{% endif %}").find("line 5"),
            std::string::npos);
  EXPECT_NE(message("{% macro f() %}\n{{ 1 + none }}{% endmacro %}\n\n{{ f() }}").find("line 2"),
            std::string::npos);
  EXPECT_NE(message("\n{% if a %}\n").find("endif"), std::string::npos);
  EXPECT_NE(message("\n\n{{ a | nosuch }}").find("line 3: no filter named 'nosuch'"),
            std::string::npos);
  EXPECT_NE(message("\xFF").find("not UTF-8"), std::string::npos);
}

TEST(Jinja, WhatIsNotSupportedIsRefusedByName) {
  for (const char* tag :
       {"block x", "extends 'x'", "include 'x'", "import 'x' as y", "autoescape true"}) {
    const std::string name(tag, std::string_view(tag).find(' '));
    const std::string error = Render(Concat("{% ", tag, " %}"), Json::object()).status().ToString();
    EXPECT_NE(error.find("'" + name + "' is not supported"), std::string::npos) << error;
  }
  EXPECT_NE(Render("{{ 'a'.encode() }}", Json::object())
                .status()
                .ToString()
                .find("'encode' is not supported"),
            std::string::npos);
  EXPECT_NE(
      Render("{{ 9223372036854775807 + 1 }}", Json::object()).status().ToString().find("64 bits"),
      std::string::npos);
}

TEST(Jinja, AnyThreadRenders) {
  const ChatTemplate chat = ChatTemplate::FromText(
      "{% for m in messages %}{{ m.content | upper ~ m | tojson }}{% endfor %}", "", "");
  const ChatMessage messages[] = {{"user", "hello"}, {"assistant", "there"}};
  const std::string expected = chat.Render(messages, true)->text;
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t i = 0; i < wrong.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int n = 0; n < 200; ++n)
        wrong[i] += chat.Render(messages, true)->text == expected ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

// ---- marks ----

// Ways in which templates handle a text `c` from the request, as part of a list, a key or a value.
const char* const kHandling[] = {
    "{{ c }}",
    "{{ c.strip() }}{{ c | trim }}{{ c.lstrip('x') }}{{ c.rstrip() }}",
    "{{ c | replace('q', 'r') }}{{ c.replace('', '') }}{{ c.replace('|', '|') }}",
    "{{ c | upper | lower }}{{ c.upper().lower() }}{{ c.title().swapcase() }}{{ c | capitalize "
    "}}{{ c | title }}",
    "{{ c ~ c }}{{ c + c }}{{ c * 2 }}{{ '' ~ c }}",
    "{{ c[:] }}{{ c[1:] }}{{ c[:-1] }}{{ c[::-1][::-1] }}{{ c[0] ~ c[1:] }}{{ (c | list)[1:] | "
    "join }}",
    "{{ '<' ~ c[1:] }}{{ c[:-1] ~ '>' }}{{ c[:2] ~ c[2:] }}",
    "{{ c | tojson }}{{ [c] | tojson(indent=1) }}{{ {c: c} | tojson(sort_keys=true) }}{{ c | "
    "tojson(separators=(c, c)) }}",
    "{{ [c] }}{{ {'a': c} }}{{ {c: 1} }}{{ (c, c) }}{{ {c: c}.items() }}{{ namespace(a=c) }}",
    "{{ '%s' % c }}{{ '%r|%5s' % (c, c) }}{{ '{} {0!r:>3}'.replace('0', '').format(c, c) }}{{ c | "
    "format }}",
    "{{ c.split('|') | join('|') }}{{ c.split() | join(' ') }}{{ c.rsplit('|', 1) | join('|') }}{{ "
    "c.splitlines() | join }}",
    "{{ c.partition('|') | join }}{{ c.removeprefix('x') }}{{ c.center(60) }}{{ c.ljust(60, '<') "
    "}}{{ c.zfill(60) }}",
    "{{ c | indent }}{{ c | indent(2, true) }}{{ c | truncate(200) }}{{ c | safe }}{{ c | string "
    "}}{{ c.expandtabs() }}",
    "{{ c | e | replace('&lt;', '<') | replace('&gt;', '>') }}",
    "{{ c | list | join }}{{ c | reverse | reverse }}{{ c | list | reverse | list | reverse | join "
    "}}",
    "{{ [c, c] | join(c) }}{{ c.join(['a', 'b']) }}{{ [c] | map('upper') | map('lower') | join "
    "}}{{ [c] | first }}{{ [c] | sort | last }}",
    "{% set x %}a{{ c }}b{% endset %}{{ x }}{{ x | upper | lower }}",
    "{% filter trim | replace('q', 'r') %} {{ c }} {% endfilter %}",
    "{% macro m(a, b=c) %}{{ a }}{{ b }}{% endmacro %}{{ m(c) }}{{ m(c) | upper | lower }}",
    "{% macro m() %}{{ caller(c) }}{% endmacro %}{% call(y) m() %}{{ y }}{% endcall %}",
    "{% generation %}{{ c }}{% endgeneration %}",
    "{% for x in c %}{{ x }}{% endfor %}{% for k in {c: 1} %}{{ k }}{% endfor %}{% for k, v in {c: "
    "c} | items %}{{ k ~ v }}{% endfor %}",
    "{% set ns = namespace(all='') %}{% for x in c %}{% set ns.all = ns.all ~ x %}{% endfor %}{{ "
    "ns.all }}",
    "{{ x | default(c) }}{{ c if c else 1 }}{{ c or 1 }}{{ c and c }}{{ [c] | unique | list }}{{ "
    "[[c]] | sum(start=[]) }}",
    "{{ ([c] | groupby(0))[0][1] }}{{ [c] | batch(2, c) | list }}{{ [{'a': c}] | "
    "map(attribute='a') | join }}",
    "{{ '%c%c' % (60, 124) }}{{ '%c' % 60 ~ '|end|>' }}{{ '{:c}'.format(60) ~ '|end|>' }}",
    "{{ strftime_now(c) }}{{ joiner(c)() ~ c }}{{ cycler(c).next() }}",
};

TEST(JinjaMarks, TextOfTheRequestNeverBecomesAControlToken) {
  auto tokenizer = Tokenizer::Load(SourcePath("models/needle-5m"));
  ASSERT_TRUE(tokenizer.ok());
  std::vector<std::string> control;
  for (int32_t id = 0; id < (*tokenizer)->vocab_size(); ++id) {
    if ((*tokenizer)->IsSpecial(id)) control.push_back((*tokenizer)->IdToToken(id));
  }
  ASSERT_GE(control.size(), 4u);
  std::string all;
  for (const std::string& token : control) all += token;
  control.push_back(all);
  for (const std::string& token : control) {
    for (const std::string& content : {token, " " + token + "\n", "x" + token + token + "\t"}) {
      for (const char* handling : kHandling) {
        const auto rendered = Render(Concat("<|user|>", handling, "<|end|>"), {{"c", content}});
        ASSERT_TRUE(rendered.ok()) << rendered.status() << handling;
        std::vector<std::string> found;
        for (int32_t id : Ids((*tokenizer)->Encode(rendered->Segments(), false))) {
          if ((*tokenizer)->IsSpecial(id)) found.push_back((*tokenizer)->IdToToken(id));
        }
        // The template's own, and no others.
        EXPECT_EQ(found, (std::vector<std::string>{"<|user|>", "<|end|>"})) << handling << "\n"
                                                                            << rendered->text;
      }
    }
  }
}

// Every byte of the request's letters is marked, and the template's own are not.
TEST(JinjaMarks, AreExact) {
  const std::string content = " \u03b1\u03b2 \u03b3\u00df \n\u03a3";
  for (const char* handling : kHandling) {
    const auto rendered = Render(Concat("own ", handling, " own"), {{"c", content}});
    ASSERT_TRUE(rendered.ok()) << rendered.status() << handling;
    size_t at = 0;
    for (const auto& [length, is_template] : rendered->segments) {
      const std::string part = rendered->text.substr(at, length);
      at += length;
      if (!is_template) continue;
      for (char c : part)
        EXPECT_LT(static_cast<unsigned char>(c), 0x80) << handling << ": " << rendered->text;
    }
    ASSERT_EQ(at, rendered->text.size());
    ASSERT_GE(rendered->segments.size(), 1u);
    EXPECT_TRUE(rendered->segments.front().second) << handling;
    EXPECT_GE(rendered->segments.front().first, 4u) << handling;
    EXPECT_TRUE(rendered->segments.back().second) << handling;
  }
  // Escapes that stand for the request's characters are the request's.
  const auto escaped = Render("{{ c | tojson(ensure_ascii=true) }}", {{"c", "\u03b1\n"}});
  const std::vector<std::pair<size_t, bool>> segments = {{1, true}, {8, false}, {1, true}};
  EXPECT_EQ(escaped->segments, segments);
}

TEST(JinjaMarks, UsualRolesAreTheTemplatesOwn) {
  const ChatTemplate chat = ChatTemplate::FromText("<|{{ messages[0].role }}|>", "", "");
  const ChatMessage usual[] = {{"user", "x"}};
  EXPECT_EQ(chat.Render(usual, true)->segments.size(), 1u);
  const ChatMessage unusual[] = {{"end", "x"}};
  const std::vector<std::pair<size_t, bool>> segments = {{2, true}, {3, false}, {2, true}};
  EXPECT_EQ(chat.Render(unusual, true)->segments, segments);
}

// ---- limits ----

std::string Times(std::string_view text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

int64_t PeakBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

struct Hostile {
  const char* name;
  std::string text;
};

std::vector<Hostile> HostileTemplates() {
  return {
      {"doubling",
       "{% set ns = namespace(x='a' * 1000) %}{% for i in range(100) %}{% set ns.x = ns.x ~ ns.x "
       "%}{% endfor %}"},
      {"doubling by set blocks",
       "{% set ns = namespace(x='a' * 1000) %}{% for i in range(100) %}{% set y %}{{ ns.x }}{{ "
       "ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}"},
      {"doubling by join",
       "{% set ns = namespace(x='a' * 1000) %}{% for i in range(100) %}{% set ns.x = [ns.x, ns.x] "
       "| join(ns.x) %}{% endfor %}"},
      {"doubling by format",
       "{% set ns = namespace(x='a' * 1000) %}{% for i in range(100) %}{% set ns.x = '%s%s' % "
       "(ns.x, ns.x) %}{% endfor %}"},
      {"doubling lists",
       "{% set ns = namespace(x=[1]) %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% "
       "endfor %}"},
      {"printing what shares",
       "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% "
       "endfor %}{{ ns.x }}"},
      {"tojson of what shares",
       "{% set ns = namespace(x=['a' * 100]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] "
       "%}{% endfor %}{{ ns.x | tojson }}"},
      {"comparing what shares",
       "{% set a = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] "
       "%}{% set a.y = [a.y, a.y] %}{% endfor %}{{ a.x == a.y }}"},
      {"a macro without end", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"},
      {"macros that branch",
       "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) "
       "}}"},
      {"a loop that calls itself", "{% for i in [1] recursive %}{{ loop([i]) }}{% endfor %}"},
      {"nested ranges",
       "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"},
      {"a deep list",
       "{% set ns = namespace(x=[]) %}{% for i in range(50000) %}{% set ns.x = [ns.x] %}{% endfor "
       "%}{{ ns.x }}"},
      {"a deep list to JSON",
       "{% set ns = namespace(x=[]) %}{% for i in range(50000) %}{% set ns.x = [ns.x] %}{% endfor "
       "%}{{ ns.x | tojson }}"},
      {"deep lists compared",
       "{% set a = namespace(x=[], y=[]) %}{% for i in range(50000) %}{% set a.x = [a.x] %}{% set "
       "a.y = [a.y] %}{% endfor %}{{ a.x == a.y }}"},
      {"a deep key",
       "{% set ns = namespace(x=()) %}{% for i in range(50000) %}{% set ns.x = (ns.x,) %}{% endfor "
       "%}{{ {ns.x: 1} }}"},
      {"quadratic replace", "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}"},
      {"replace of nothing", "{{ ('a' * 1000000) | replace('', 'b' * 1000000) }}"},
      {"a long string", "{{ 'a' * 1000000000000 }}"},
      {"a long list", "{{ [0] * 1000000000000 }}"},
      {"a long range", "{% for i in range(1000000000) %}{% endfor %}"},
      {"a wide format", "{{ '%999999999d' % 1 }}"},
      {"a precise format", "{{ '%.999999999f' % 1.5 }}"},
      {"a wide field", "{{ '{:>999999999}'.format(1) }}"},
      {"wide fields", "{{ '{:>99999}' * 100000 }}{{ ('{0:>99999}' * 100000).format(1) }}"},
      {"a wide indent", "{{ [[1]] | tojson(indent=1000000000) }}"},
      {"a wide center", "{{ 'a'.center(1000000000000) }}"},
      {"a long batch", "{{ [1] | batch(1000000000000, 2) | list }}"},
      {"many slices", "{{ [1] | slice(1000000000000) | list }}"},
      {"many parts",
       "{% set x = ('a ' * 1000000) %}{% for i in range(100) %}{% set y = x.split() %}{% endfor "
       "%}"},
      {"a power", "{{ 10 ** 1000000 }}"},
      {"much output", "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}"},
      {"nested captures", Times("{% set y %}", 90) + "{{ 'a' * 20000000 }}{{ 'a' * 20000000 }}" +
                              Times("{{ 'a' * 20000000 }}{% endset %}", 90)},
      {"many searches",
       "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{{ x.find('b') }}{% endfor %}"},
      {"much sorting",
       "{% set x = range(100000) | list %}{% for i in range(1000) %}{% set y = x | "
       "sort(reverse=true) %}{% endfor %}"},
      {"many objects",
       "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% for j in range(100000) %}{% "
       "set y = {'a': [1]} %}{% endfor %}{% endfor %}"},
      {"open brackets", "{{ " + Times("(", 100000)},
      {"open lists", "{{ " + Times("[", 100000)},
      {"open dicts", "{{ " + Times("{1:", 100000)},
      {"open calls", "{{ " + Times("f(", 100000)},
      {"many signs", "{{ " + Times("- ", 100000) + "1 }}"},
      {"many nots", "{{ " + Times("not ", 100000) + "1 }}"},
      {"many attributes", "{{ a" + Times(".a", 100000) + " }}"},
      {"many filters", "{{ 'a'" + Times("|e", 100000) + " }}"},
      {"many sums", "{{ 1" + Times("+1", 100000) + " }}"},
      {"many conditions", "{{ 1" + Times(" if 1 else 1", 80000) + " }}"},
      {"many ifs", Times("{% if 1 %}", 100000)},
      {"many fors", Times("{% for a in [1] %}", 50000)},
      {"deep sums", "{{ " + Times(Times("1+", 100) + "(", 150) + "1" + Times(")", 150) + " }}"},
      {"a long template", std::string((1 << 20) + 1, ' ')},
  };
}

TEST(JinjaLimits, HostileTemplatesEndSoonInBoundedMemory) {
  for (const Hostile& hostile : HostileTemplates()) {
    const int64_t before = PeakBytes();
    const auto start = std::chrono::steady_clock::now();
    jinja::Limits limits;
    limits.time_max = std::chrono::milliseconds(200);
    const absl::Status status = Render(hostile.text, Json::object(), limits).status();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    EXPECT_FALSE(status.ok()) << hostile.name;
    EXPECT_NE(status.ToString().find("line 1: "), std::string::npos)
        << hostile.name << ": " << status;
    EXPECT_LT(status.message().size(), 300u) << hostile.name;
    // The rest beyond the limit is for a busy machine.
    EXPECT_LT(seconds.count(), 10) << hostile.name;
#ifndef __SANITIZE_ADDRESS__
    EXPECT_LT(PeakBytes() - before, int64_t{800} << 20) << hostile.name;
#else
    (void)before;
#endif
  }
}

TEST(JinjaLimits, EachNamesItself) {
  const auto with = [](std::string_view text, auto set) {
    jinja::Limits limits;
    set(&limits);
    return Render(text, Json::object(), limits).status();
  };
  const absl::Status steps =
      with("\n{% for i in range(1000) %}{% endfor %}", [](auto* l) { l->steps_max = 100; });
  EXPECT_EQ(steps.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(steps.message(), "chat template, line 2: the limit of 100 steps is reached");
  const absl::Status depth = with("{{ [[[[[1]]]]] }}", [](auto* l) { l->depth_max = 4; });
  EXPECT_EQ(depth.message(), "chat template, line 1: the limit of 4 levels of nesting is reached");
  const absl::Status output = with("\n\n{{ 'a' * 11 }}", [](auto* l) { l->output_bytes_max = 10; });
  EXPECT_EQ(output.message(), "chat template, line 3: the limit of 10 bytes of output is reached");
  const absl::Status memory =
      with("{{ 'a' * 100000 }}", [](auto* l) { l->memory_bytes_max = 50000; });
  EXPECT_EQ(memory.message(),
            "chat template, line 1: the limit of 50000 bytes of memory is reached");
  const absl::Status time =
      with("{% for i in range(100000) %}{% for i in range(9) %}{% endfor %}{% endfor %}",
           [](auto* l) { l->time_max = std::chrono::milliseconds(0); });
  EXPECT_EQ(time.message(), "chat template, line 1: the limit of 0 ms of time is reached");
}

TEST(JinjaLimits, RequestsAreBoundedToo) {
  Json deep = 1;
  for (int i = 0; i < 200; ++i) deep = Json::array({deep});
  EXPECT_EQ(Render("x", {{"a", deep}}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Render("x", {{"a", uint64_t{1} << 63}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Render("x", {{"messages", 1}}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Render("x", {{"a", "\xFF"}}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace winnow::engine
