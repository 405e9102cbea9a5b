#include "engine/model_retrieval.h"
#include "engine/kv_planning.h"

#include <filesystem>
#include <functional>
#include <string>

#include "engine/kv/host_memory.h"
#include "engine/model_loader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = AttentionPolicy::Kind;

const std::string kNeedle = SourcePath("models/needle-5m");
const std::string kArtifact = kNeedle + "/" + kArtifactFile;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

IndexList ParsedList(std::string_view text) {
  const auto list = ParseIndexList(text);
  EXPECT_TRUE(list.ok()) << text << ": " << list.status();
  return list.value_or(IndexList());
}

TEST(ParseIndexList, ReadsWordsAndLists) {
  EXPECT_TRUE(ParsedList("auto").automatic);
  EXPECT_FALSE(ParsedList("none").automatic);
  EXPECT_TRUE(ParsedList("none").specs.empty());
  EXPECT_FALSE(ParsedList("none").four_bit_keys);
  const IndexList list = ParsedList("lsh:64,quest,int4,lsh,spotlight,hashattention:32");
  EXPECT_FALSE(list.automatic);
  EXPECT_TRUE(list.four_bit_keys);
  EXPECT_THAT(list.specs, ElementsAre(IndexSpec{Kind::kLsh, 64}, IndexSpec{Kind::kQuest, 0},
                                      IndexSpec{Kind::kLsh, 0}, IndexSpec{Kind::kSpotlight, 0},
                                      IndexSpec{Kind::kHashAttention, 32}));
  EXPECT_THAT(ParsedList("lsh:1024").specs, ElementsAre(IndexSpec{Kind::kLsh, 1024}));
  EXPECT_TRUE(ParsedList("int4").specs.empty());
  EXPECT_FALSE(ParsedList("auto").residual_codes);
  EXPECT_FALSE(ParsedList("pca").residual_codes);
  EXPECT_TRUE(ParsedList("residual,pca:192").residual_codes);
  EXPECT_THAT(ParsedList("residual,pca:192").specs, ElementsAre(IndexSpec{Kind::kPca, 192}));
}

TEST(ParseIndexList, NamesTheEntryThatIsWrong) {
  for (const char* text : {"",
                           "residual",
                           "lsh,residual",
                           "pca,residual,residual",
                           "pca,residual:128",
                           "lsh,",
                           ",lsh",
                           "lsh,,quest",
                           "dense",
                           "oracle",
                           "window",
                           "spotlite",
                           "lsh:",
                           "lsh:0",
                           "lsh:127",
                           "lsh:+128",
                           "lsh:128x",
                           "lsh:99999999999",
                           "hata:512",
                           "quest:16",
                           "int4:4",
                           "auto,lsh",
                           "none,lsh",
                           "lsh, quest",
                           "quest,quest",
                           "int4,int4",
                           "lsh:64,lsh:64",
                           "hata,hata:128"}) {
    const absl::Status status = ParseIndexList(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(Message(status), HasSubstr("index: '")) << text;
  }
  EXPECT_THAT(Message(ParseIndexList("lsh,spotlite").status()), HasSubstr("'spotlite'"));
}

TEST(ParseRetrievalFrom, IsAutoOrANumber) {
  EXPECT_EQ(*ParseRetrievalFrom("auto"), -1);
  EXPECT_EQ(*ParseRetrievalFrom("0"), 0);
  EXPECT_EQ(*ParseRetrievalFrom("4096"), 4096);
  for (const char* text : {"", "-1", "4k", "auto ", "1e3", "99999999999", "268435457"}) {
    EXPECT_EQ(ParseRetrievalFrom(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(ModelRetrieval, BadFlagsAreRefusedBeforeAFileIsOpened) {
  ModelConfig config;
  config.num_heads = 4;
  for (const auto& [spoil, part] :
       std::vector<std::pair<std::function<void(RetrievalFlags&)>, std::string>>{
           {[](RetrievalFlags& f) { f.index = "nonsense"; }, "index: 'nonsense'"},
           {[](RetrievalFlags& f) { f.from = "soon"; }, "retrieval_from: 'soon'"},
           {[](RetrievalFlags& f) { f.probe_interval = -1; }, "probe_interval: -1"}}) {
    ModelOptions options;
    spoil(options.retrieval);
    const absl::Status status = ResolveDecoderOptions(config, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Message(status), HasSubstr(part));
  }
}

// A copy of the small model without its artifact.
class ModelDirectory {
 public:
  ModelDirectory() {
    for (const char* file : {"config.json", "generation_config.json", "model.safetensors",
                             "tokenizer.json", "tokenizer_config.json"}) {
      std::filesystem::create_symlink(kNeedle + "/" + file, directory_.File(file));
    }
  }
  const std::string& path() const { return directory_.path(); }
  std::string artifact() const { return directory_.File(kArtifactFile); }

 private:
  TempDir directory_;
};

ModelOptions Small(const std::string& artifact, const std::string& index) {
  ModelOptions options;
  options.max_context = 256;
  options.max_batch_tokens = 64;
  options.num_threads = 1;
  options.retrieval.artifact = artifact;
  options.retrieval.index = index;
  options.retrieval.crossover_cache = ::testing::TempDir() + "/winnow-fits/crossover.json";
  // A fit of less text, on a busy machine, would be another.
  options.retrieval.fit_budget = std::chrono::hours(24);
  return options;
}

std::vector<std::string> Indexes(const LoadedModel& model) {
  std::vector<std::string> names;
  for (const IndexKvPlan& index : model.decoder->kv_plan().indexes) names.push_back(index.title);
  return names;
}

TEST(ModelRetrieval, TheDirectorysArtifactIsTakenUnlessToldOtherwise) {
  const ModelDirectory directory;
  const auto without = LoadModel(directory.path(), Small("", "auto"));
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_EQ((*without)->decoder_options.retrieval.artifact, nullptr);
  // Without one, what needs no training takes its place.
  EXPECT_THAT(Indexes(**without), ElementsAre("quest", "lsh:128", "pca:128", "int4"));

  std::filesystem::create_symlink(kArtifact, directory.artifact());
  const auto with = LoadModel(directory.path(), Small("", "auto"));
  ASSERT_TRUE(with.ok()) << with.status();
  ASSERT_NE((*with)->decoder_options.retrieval.artifact, nullptr);
  EXPECT_EQ((*with)->decoder_options.retrieval.transform, nullptr);
  EXPECT_THAT(Indexes(**with),
              ::testing::IsSupersetOf({"quest", "lsh:128", "spotlight:128", "int4"}));

  const auto declined = LoadModel(directory.path(), Small("none", "auto"));
  ASSERT_TRUE(declined.ok()) << declined.status();
  EXPECT_EQ((*declined)->decoder_options.retrieval.artifact, nullptr);
}

TEST(ModelRetrieval, AnArtifactThatCannotBeUsedIsRefusedByName) {
  const ModelDirectory directory;
  EXPECT_EQ(LoadModel(directory.path(), Small("/no/such/file", "auto")).status().code(),
            absl::StatusCode::kNotFound);
  // Damaged, and found by itself.
  WriteText(directory.artifact(), "not safetensors");
  const absl::Status damaged = LoadModel(directory.path(), Small("", "auto")).status();
  EXPECT_FALSE(damaged.ok());
  EXPECT_THAT(Message(damaged), HasSubstr(directory.artifact()));
  EXPECT_TRUE(LoadModel(directory.path(), Small("none", "auto")).ok());
  // Of another model: one weight is another.
  std::filesystem::remove(directory.artifact());
  std::filesystem::remove(directory.path() + "/model.safetensors");
  std::string weights = ReadText(kNeedle + "/model.safetensors");
  weights.back() ^= 1;
  weights[weights.size() - 40000] ^= 1;
  WriteText(directory.path() + "/model.safetensors", weights);
  const absl::Status other = LoadModel(directory.path(), Small(kArtifact, "auto")).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(other), HasSubstr(kArtifact));
  EXPECT_THAT(Message(other), HasSubstr("fingerprint"));
}

TEST(ModelRetrieval, IndexesAreWhatIsAskedFor) {
  const auto listed = LoadModel(kNeedle, Small("", "lsh:64,lsh,spotlight"));
  ASSERT_TRUE(listed.ok()) << listed.status();
  EXPECT_THAT(Indexes(**listed), ElementsAre("lsh:64", "lsh:128", "spotlight:128"));
  const auto none = LoadModel(kNeedle, Small("", "none"));
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_THAT(Indexes(**none), ElementsAre());
  EXPECT_EQ((*none)->decoder->index_bytes(), 0u);
  EXPECT_THAT(Message(LoadModel(kNeedle, Small("none", "spotlight")).status()),
              HasSubstr("index: spotlight is learned, and there is no artifact"));
  EXPECT_THAT(Message(LoadModel(kNeedle, Small("", "spotlight:32")).status()),
              HasSubstr("index: the artifact's spotlight has 128 bits, not 32"));
}

TEST(ModelRetrieval, ResidualCodesAreKeptWhereTheyAreAskedFor) {
  const ModelDirectory directory;
  const AttentionPolicy reranked = *ParseAttentionPolicy("pca:rerank=on");
  const auto expect = [&](const ModelOptions& options, const std::vector<std::string>& titles,
                          bool accepts) {
    const auto model = LoadModel(directory.path(), options);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(Indexes(**model), titles);
    const absl::Status status = (*model)->decoder->CheckPolicy(reranked);
    EXPECT_EQ(status.ok(), accepts) << status;
    if (accepts) return;
    EXPECT_THAT(Message(status), HasSubstr("rerank: there are no residual codes"));
  };
  expect(Small("", "pca"), {"pca:128"}, false);
  expect(Small("", "pca,residual"), {"pca:128", "residual"}, true);
  ModelOptions automatic = Small("", "auto");
  expect(automatic, {"quest", "lsh:128", "pca:128", "int4"}, false);
  automatic.retrieval.residual_codes = true;
  expect(automatic, {"quest", "lsh:128", "pca:128", "residual", "int4"}, true);
  automatic.retrieval.residual_codes = false;
  automatic.retrieval.policies = {reranked};
  expect(automatic, {"pca:128", "residual"}, true);
}

TEST(ModelRetrieval, TransformCodesAreFittedOnceAndRemembered) {
  const ModelDirectory directory;
  const TempDir cache;
  ModelOptions options = Small("", "pca:64");
  options.retrieval.crossover_cache = cache.File("crossover.json");
  double done = 0;
  options.retrieval.progress = [&](double share) {
    EXPECT_GE(share, done);
    done = share;
  };
  const auto first = LoadModel(directory.path(), options);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE((*first)->transform.cached);
  EXPECT_EQ(done, 1);
  EXPECT_GE((*first)->transform.sample_tokens, 1024);
  EXPECT_GT((*first)->transform.heads_with_tail, 0);
  EXPECT_THAT(Indexes(**first), ElementsAre("pca:64"));
  options.retrieval.progress = nullptr;
  const auto second = LoadModel(directory.path(), options);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_TRUE((*second)->transform.cached);
  const std::string& id = (*first)->decoder_options.retrieval.transform->id;
  EXPECT_EQ((*second)->decoder_options.retrieval.transform->id, id);
  // A file that is damaged is made again, and comes out the same.
  for (const auto& entry : std::filesystem::directory_iterator(cache.File(""))) {
    if (entry.path().extension() != ".bin") continue;
    std::string bytes = ReadText(entry.path().string());
    bytes[bytes.size() / 2] ^= 1;
    WriteText(entry.path().string(), bytes);
  }
  const auto third = LoadModel(directory.path(), options);
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_FALSE((*third)->transform.cached);
  EXPECT_EQ((*third)->decoder_options.retrieval.transform->id, id);

  // Another text is another fit, which is remembered beside the first.
  options.retrieval.fit_text = ReadText(directory.path() + "/tokenizer.json");
  for (const bool cached : {false, true}) {
    const auto other = LoadModel(directory.path(), options);
    ASSERT_TRUE(other.ok()) << other.status();
    EXPECT_EQ((*other)->transform.cached, cached);
    EXPECT_NE((*other)->decoder_options.retrieval.transform->id, id);
  }
  options.retrieval.fit_text = "Too short.";
  EXPECT_THAT(Message(LoadModel(directory.path(), options).status()), HasSubstr("too short"));
  options.retrieval.fit_text.clear();

  const Decoder& decoder = *(*first)->decoder;
  EXPECT_TRUE(decoder.CheckPolicy(*ParseAttentionPolicy("pca:k=2%")).ok());
  EXPECT_THAT(Message(decoder.CheckPolicy(*ParseAttentionPolicy("pca:bits=128"))),
              HasSubstr("bits: the codes here have 64"));
  EXPECT_THAT(Message(decoder.CheckPolicy(*ParseAttentionPolicy("pca:completion=on"))),
              HasSubstr("completion"));
  options.retrieval.policies = {*ParseAttentionPolicy("pca:bits=64"),
                                *ParseAttentionPolicy("pca:bits=128")};
  options.retrieval.index = "auto";
  EXPECT_THAT(Message(LoadModel(directory.path(), options).status()),
              HasSubstr("of 64 and of 128 bits"));
}

TEST(ModelRetrieval, PoliciesSayWhatIsNeeded) {
  ModelOptions options = Small("", "auto");
  options.retrieval.policies = {*ParseAttentionPolicy("quest:k=16"),
                                *ParseAttentionPolicy("lsh:bits=64,p=0.9"),
                                *ParseAttentionPolicy("dense")};
  const auto model = LoadModel(kNeedle, options);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(Indexes(**model), ElementsAre("quest", "lsh:64", "int4"));
}

TEST(ModelRetrieval, PoolsAreCountedAsTheyAreTaken) {
  for (const char* index : {"quest", "lsh", "lsh:64", "spotlight", "int4", "auto", "none"}) {
    const auto model = LoadModel(kNeedle, Small("", index));
    ASSERT_TRUE(model.ok()) << index << ": " << model.status();
    EXPECT_EQ((*model)->decoder->kv_plan().index_bytes,
              static_cast<int64_t>((*model)->decoder->index_bytes()))
        << index;
    // kv_bytes stays what it was: KV alone.
    EXPECT_EQ((*model)->decoder->kv_pool_bytes(),
              static_cast<size_t>((*model)->decoder_options.kv_bytes));
  }
}

TEST(ModelRetrieval, SummariesHaveAPlaceEachWhileTheyRun) {
  ModelOptions options = Small("", "spotlight");
  options.retrieval.summaries = 2;
  const auto model = LoadModel(kNeedle, options);
  ASSERT_TRUE(model.ok()) << model.status();
  Decoder& decoder = *(*model)->decoder;
  EXPECT_EQ(static_cast<int64_t>(decoder.summary_bytes()),
            2 * SummaryBytes((*model)->config, (*model)->decoder_options.retrieval));
  EXPECT_GT(decoder.summary_bytes(), 0u);

  const AttentionPolicy completes = *ParseAttentionPolicy("spotlight:k=16,completion=on");
  auto first = decoder.NewRetrievalState(completes);
  auto second = decoder.NewRetrievalState(completes);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(decoder.NewRetrievalState(completes).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(decoder.NewRetrievalState(*ParseAttentionPolicy("spotlight:k=16")).ok());

  // A suspended one makes room, and waits for it in turn.
  (*first)->Suspend();
  auto third = decoder.NewRetrievalState(completes);
  ASSERT_TRUE(third.ok());
  EXPECT_EQ(decoder.ResumeRetrieval(**first).code(), absl::StatusCode::kResourceExhausted);
  second->reset();
  EXPECT_TRUE(decoder.ResumeRetrieval(**first).ok());
  EXPECT_TRUE(decoder.ResumeRetrieval(**first).ok());  // has one: nothing to do
  EXPECT_FALSE(decoder.NewRetrievalState(completes).ok());
}

TEST(ModelRetrieval, IndexesThatDoNotFitAreRefusedWithTheirBytes) {
  ModelConfig config;
  config.hidden_size = 64;
  config.intermediate_size = 64;
  config.layers.resize(1);
  config.num_heads = config.num_kv_heads = 1;
  config.head_dim = 64;
  config.vocab_size = 64;
  DecoderOptions options;
  const std::optional<int64_t> available = AvailableMemoryBytes();
  ASSERT_TRUE(available.has_value());
  // The KV alone fits; with lsh:1024, 128 bytes for each row of 256, it does not.
  options.kv_bytes = *available - *available / 5;
  const auto backend = kernels::MakeCpuBackend("scalar", 1);
  EXPECT_TRUE(CheckMemory(config, options, *PlanKv(config, options), *backend).ok());
  options.retrieval.indexes = {{Kind::kLsh, 1024}};
  const KvPlan plan = *PlanKv(config, options);
  const absl::Status status = CheckMemory(config, options, plan, *backend);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(status),
              HasSubstr("indexes beside it (index) " + std::to_string(plan.index_bytes)));
  EXPECT_NEAR(static_cast<double>(plan.index_bytes), static_cast<double>(options.kv_bytes) / 2,
              1e6);
}

TEST(ModelRetrieval, FromIsConfiguredOrMeasuredAndRemembered) {
  const TempDir cache;
  ModelOptions options = Small("none", "lsh");
  options.max_context = 2048;
  options.retrieval.from = "777";
  options.retrieval.crossover_cache = cache.File("crossover.json");
  const auto configured = LoadModel(kNeedle, options);
  ASSERT_TRUE(configured.ok()) << configured.status();
  EXPECT_EQ((*configured)->decoder->options().retrieval.from, 777);
  EXPECT_EQ((*configured)->crossover.index, "");
  EXPECT_FALSE(std::filesystem::exists(cache.File("crossover.json")));

  options.retrieval.from = "auto";
  const auto measured = LoadModel(kNeedle, options);
  ASSERT_TRUE(measured.ok()) << measured.status();
  EXPECT_EQ((*measured)->crossover.index, "lsh:128");
  EXPECT_FALSE((*measured)->crossover.cached);
  EXPECT_EQ((*measured)->crossover.problem, "");
  EXPECT_FALSE((*measured)->crossover.crossover.samples.empty());
  EXPECT_EQ((*measured)->decoder->options().retrieval.from, (*measured)->crossover.crossover.from);

  const auto cached = LoadModel(kNeedle, options);
  ASSERT_TRUE(cached.ok()) << cached.status();
  EXPECT_TRUE((*cached)->crossover.cached);
  EXPECT_EQ((*cached)->crossover.crossover, (*measured)->crossover.crossover);

  // Nothing to measure without an index.
  options.retrieval.index = "none";
  const auto bare = LoadModel(kNeedle, options);
  ASSERT_TRUE(bare.ok()) << bare.status();
  EXPECT_EQ((*bare)->decoder->options().retrieval.from, 0);
  EXPECT_EQ((*bare)->crossover.index, "");
}

}  // namespace
}  // namespace winnow::engine
