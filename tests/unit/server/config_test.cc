#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "server/model_options.h"
#include "tests/unit/temp_dir.h"

namespace winnow::server {
namespace {

using ::testing::HasSubstr;

class ConfigTest : public ::testing::Test {
 protected:
  const std::string& File(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }

  static absl::StatusOr<ResolvedConfig> Resolve(std::map<std::string, std::string> flags,
                                                std::map<std::string, std::string> environment,
                                                const std::string& file = "") {
    return ResolveConfig(
        flags,
        [&](const std::string& name) -> std::optional<std::string> {
          const auto it = environment.find(name);
          return it == environment.end() ? std::nullopt : std::optional(it->second);
        },
        file);
  }

  static std::string Error(const absl::StatusOr<ResolvedConfig>& resolved) {
    EXPECT_EQ(resolved.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(resolved.status().message());
  }

  const TempDir dir_;
  const std::string path_ = dir_.File("config.yaml");
};

TEST_F(ConfigTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  const std::string file = File("step_tokens: 100\nmax_running: 10\nqueue_requests: 7\n");
  const auto resolved =
      Resolve({{"step-tokens", "300"}},
              {{"WINNOW_STEP_TOKENS", "200"}, {"WINNOW_MAX_RUNNING", "20"}}, file);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->config.step_tokens, 300);
  EXPECT_EQ(resolved->config.max_running, 20);
  EXPECT_EQ(resolved->config.queue_requests, 7);
  EXPECT_EQ(resolved->config.tokenize_threads, ServeConfig().tokenize_threads);
  EXPECT_EQ(resolved->origin.at("step-tokens"), "flag --step-tokens");
  EXPECT_EQ(resolved->origin.at("max-running"), "environment WINNOW_MAX_RUNNING");
  EXPECT_EQ(resolved->origin.at("queue-requests"), file + ":3");
  EXPECT_EQ(resolved->origin.at("tokenize-threads"), "default");
}

TEST_F(ConfigTest, EveryDefaultPassesItsOwnCheck) {
  ServeConfig config;
  for (const ServeOption& option : ServeOptions()) {
    const std::string value = option.get(ServeConfig());
    EXPECT_TRUE(option.set(config, value).ok()) << option.name << " " << value;
    EXPECT_EQ(option.get(config), value) << option.name;
    EXPECT_FALSE(option.help.empty()) << option.name;
  }
}

TEST_F(ConfigTest, APolicyThatReRanksKeepsResidualCodes) {
  ServeConfig config;
  EXPECT_FALSE(ModelOptionsOf(config).retrieval.residual_codes);
  config.policy = "pca:k=2%";
  EXPECT_FALSE(ModelOptionsOf(config).retrieval.residual_codes);
  config.policy = "pca:k=2%,rerank=on";
  EXPECT_TRUE(ModelOptionsOf(config).retrieval.residual_codes);
}

TEST_F(ConfigTest, UnknownKeyIsAnErrorThatSuggests) {
  EXPECT_THAT(Error(Resolve({}, {}, File("model: x\nmax_runing: 3\n"))),
              HasSubstr(":2: unknown option max_runing: did you mean max_running?"));
  EXPECT_THAT(Error(Resolve({}, {}, File("zzzzzzzz: 3\n"))), HasSubstr("unknown option zzzzzzzz"));
}

TEST_F(ConfigTest, FileThatIsNotAFlatMapIsAnError) {
  EXPECT_THAT(Error(Resolve({}, {}, File("- a\n- b\n"))), HasSubstr("must be a map"));
  EXPECT_THAT(Error(Resolve({}, {}, File("listen: [a, b]\n"))), HasSubstr("single value"));
  EXPECT_THAT(Error(Resolve({}, {}, File("listen: {a: b}\n"))), HasSubstr("single value"));
  EXPECT_THAT(Error(Resolve({}, {}, File("threads: 1\nthreads: 2\n"))), HasSubstr("twice"));
  EXPECT_THAT(Error(Resolve({}, {}, File("threads: 'x\n"))), HasSubstr("yaml:"));
  EXPECT_THAT(Error(Resolve({}, {}, path_ + ".missing")), HasSubstr("cannot be read"));
  EXPECT_THAT(Error(Resolve({}, {}, "/")), HasSubstr("/: not a regular file"));
  // Refused by its size: the parser would take seconds for it.
  EXPECT_THAT(Error(Resolve({}, {}, File("model: " + std::string(2 << 20, 'x') + "\n"))),
              HasSubstr("bytes, more than the 1048576 allowed"));
  EXPECT_THAT(Error(Resolve({}, {}, File("threads: 1\n---\nmax_running: 2\n"))),
              HasSubstr("more than one document"));
  // At a stray comma yaml-cpp finds documents without an end.
  EXPECT_THAT(Error(Resolve({}, {}, File(", a"))), HasSubstr(":1: holds more than one document"));
  for (const char* empty : {"", "~", "null"}) {
    EXPECT_THAT(Error(Resolve({}, {}, File(std::string("threads: 1\nstore_dir: ") + empty + "\n"))),
                HasSubstr(":2: store_dir: has no value"));
  }
}

TEST_F(ConfigTest, EmptyFileSaysNothing) {
  EXPECT_TRUE(Resolve({}, {}, File("")).ok());
  EXPECT_TRUE(Resolve({}, {}, File("# only a comment\n")).ok());
}

TEST_F(ConfigTest, EmptyEnvironmentVariableCountsAsNotSet) {
  const auto resolved = Resolve({}, {{"WINNOW_THREADS", ""}});
  ASSERT_TRUE(resolved.ok());
  EXPECT_EQ(resolved->origin.at("threads"), "default");
}

TEST_F(ConfigTest, WrongValueSaysWhereItCameFromAndWhatIsTaken) {
  EXPECT_THAT(Error(Resolve({{"threads", "many"}}, {})),
              HasSubstr("flag --threads: \"many\": must be an integer in [0, 1024]"));
  EXPECT_THAT(Error(Resolve({}, {{"WINNOW_THREADS", "-1"}})),
              HasSubstr("environment WINNOW_THREADS"));
  EXPECT_THAT(Error(Resolve({}, {}, File("log_level: loud\n"))),
              HasSubstr(":1: \"loud\": must be one of debug|info|warn|error"));
}

TEST_F(ConfigTest, BadValuesOfEachKindAreRefused) {
  const std::pair<const char*, const char*> bad[] = {
      {"threads", ""},
      {"threads", "1.5"},
      {"threads", "1025"},
      {"threads", "99999999999999999999"},
      {"kv-bytes", "-1"},
      {"kv-bytes", "nan"},
      {"kv-bytes", "inf"},
      {"kv-bytes", "1e9"},
      {"kv-bytes", "1KB"},
      {"kv-bytes", "GiB"},
      {"kv-bytes", "0.3"},
      {"kv-bytes", "99999999TiB"},
      {"drain-grace", "30"},
      {"drain-grace", "-1s"},
      {"drain-grace", "inf"},
      {"drain-grace", "25h"},
      {"listen", "50051"},
      {"listen", ":50051"},
      {"listen", "127.0.0.1:"},
      {"listen", "127.0.0.1:65536"},
      {"listen", "127.0.0.1:+1"},
      {"listen", "127.0.0.1: 1"},
      {"listen", "unix:/tmp/socket"},
      {"listen", "[::1:50051"},
      {"listen", "[nonsense]:1"},
      {"listen", "off"},
      {"insecure", "yes"},
      {"policy", "sparse"},
      {"policy", "quest:pages=3"},
      {"index", "spotlite"},
      {"index", ""},
      {"retrieval-from", "4k"},
      {"probe-interval", "-1"},
      {"device", "tpu"},
      {"dtype", "int8"},
  };
  for (const auto& [name, value] : bad) {
    EXPECT_FALSE(Resolve({{name, value}}, {}).ok()) << name << "=" << value;
  }
}

TEST_F(ConfigTest, GoodValuesOfEachKindAreTaken) {
  const auto resolved = Resolve({{"kv-bytes", "1.5GiB"},
                                 {"drain-grace", "1m30s"},
                                 {"listen", "[::1]:0"},
                                 {"metrics", "off"},
                                 {"insecure", "true"}},
                                {});
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->config.kv_bytes, int64_t{3} << 29);
  EXPECT_EQ(resolved->config.drain_grace, absl::Seconds(90));
  EXPECT_TRUE(resolved->config.insecure);
}

TEST_F(ConfigTest, PrintedConfigurationIsAFileThatGivesTheSame) {
  const auto first = Resolve({{"model", "/models/it's \"mine\": \\ #1"},
                              {"model-name", "null"},
                              {"artifact", "-"},
                              {"threads", "3"},
                              {"listen", "[::1]:1234"},
                              {"reflection", "true"}},
                             {});
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = Resolve({}, {}, File(PrintConfig(*first)));
  ASSERT_TRUE(second.ok()) << second.status();
  for (const ServeOption& option : ServeOptions()) {
    EXPECT_EQ(option.get(first->config), option.get(second->config)) << option.name;
  }
}

TEST_F(ConfigTest, LoopbackIsRecognised) {
  for (const char* local : {"127.0.0.1:1", "127.8.9.10:1", "[::1]:1", "localhost:1"}) {
    EXPECT_TRUE(ParseHostPort(local)->loopback) << local;
  }
  for (const char* open : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "128.0.0.1:1"}) {
    EXPECT_FALSE(ParseHostPort(open)->loopback) << open;
  }
}

class CheckConfigTest : public ::testing::Test {
 protected:
  CheckConfigTest() { config_.model = "somewhere"; }
  std::string Error() const { return std::string(CheckConfig(config_).message()); }
  ServeConfig config_;
};

TEST_F(CheckConfigTest, DefaultsAndAModelAreEnough) { EXPECT_TRUE(CheckConfig(config_).ok()); }

TEST_F(CheckConfigTest, ModelIsRequired) {
  config_.model.clear();
  EXPECT_THAT(Error(), HasSubstr("--model"));
}

TEST_F(CheckConfigTest, HalfConfiguredTlsIsRefused) {
  config_.tls_cert = "cert.pem";
  EXPECT_THAT(Error(), HasSubstr("only --tls-cert"));
  config_.tls_cert.clear();
  config_.tls_key = "key.pem";
  EXPECT_THAT(Error(), HasSubstr("only --tls-key"));
  config_.tls_key.clear();
  config_.tls_client_ca = "ca.pem";
  EXPECT_THAT(Error(), HasSubstr("--tls-client-ca needs"));
}

TEST_F(CheckConfigTest, PlaintextOnTheNetworkNeedsInsecure) {
  config_.listen = "0.0.0.0:50051";
  EXPECT_THAT(Error(), HasSubstr("--insecure"));
  config_.insecure = true;
  EXPECT_TRUE(CheckConfig(config_).ok());
  config_.insecure = false;
  config_.tls_cert = "cert.pem";
  config_.tls_key = "key.pem";
  EXPECT_TRUE(CheckConfig(config_).ok());
  config_.metrics = "0.0.0.0:9464";
  EXPECT_THAT(Error(), HasSubstr("--metrics"));
}

TEST_F(CheckConfigTest, TheOperatorsPortIsOnLoopbackWhateverElseIsAllowed) {
  config_.insecure = true;
  config_.admin_listen = "0.0.0.0:50052";
  EXPECT_THAT(Error(), HasSubstr("--admin-listen 0.0.0.0:50052"));
  config_.admin_listen = "127.0.0.1:50052";
  EXPECT_TRUE(CheckConfig(config_).ok());
  config_.admin_listen = config_.listen;
  EXPECT_THAT(Error(), HasSubstr("--admin-listen"));
}

TEST_F(CheckConfigTest, OfSlowerTiersAGpuHasTheHostsMemory) {
  config_.device = "cuda";
  config_.host_bytes = int64_t{8} << 30;
  EXPECT_TRUE(CheckConfig(config_).ok());
  config_.kv_bytes = 1 << 30;
  EXPECT_THAT(Error(), HasSubstr("--kv-bytes: with --device cuda --host-bytes says how much"));
  config_.kv_bytes = 0;
  config_.prefetch = "on";
  EXPECT_THAT(Error(), HasSubstr("--prefetch: with --device cuda"));
  config_.prefetch = "off";
  config_.resume = "lazy";
  EXPECT_THAT(Error(), HasSubstr("--resume: with --device cuda prefixes are stored on disk"));
  config_.disk_bytes = int64_t{8} << 30;
  config_.store_dir = "/tmp";
  EXPECT_TRUE(CheckConfig(config_).ok());
  config_.prefix_cache = "off";
  EXPECT_THAT(Error(), HasSubstr("--disk-bytes: with --device cuda and without --spill on"));
  config_.prefix_cache = "on";
  config_.row_cache_bytes = 1 << 30;
  EXPECT_TRUE(CheckConfig(config_).ok());
  config_.host_bytes = 0;
  EXPECT_THAT(Error(), HasSubstr("--row-cache-bytes: with --device cuda"));
}

TEST_F(CheckConfigTest, GraphsAreAGpus) {
  config_.cuda_graphs = "off";
  EXPECT_THAT(Error(), HasSubstr("--cuda-graphs is for --device cuda"));
  config_.device = "cuda";
  EXPECT_TRUE(CheckConfig(config_).ok()) << CheckConfig(config_);
}

TEST_F(CheckConfigTest, WhatSpillsNeedsAGpuAndBothTiers) {
  config_.spill = "on";
  EXPECT_THAT(Error(), HasSubstr("--spill is for --device cuda"));
  config_.device = "cuda";
  config_.host_bytes = int64_t{8} << 30;
  EXPECT_THAT(Error(), HasSubstr("--spill: KV goes from memory of the host to a disk"));
  config_.disk_bytes = int64_t{80} << 30;
  config_.store_dir = "/tmp";
  config_.kv_bytes = 1 << 30;
  config_.prefetch = "on";
  config_.prefix_cache = "off";
  config_.row_cache_bytes = 1 << 30;
  EXPECT_TRUE(CheckConfig(config_).ok()) << CheckConfig(config_);
  config_.host_bytes = 0;
  EXPECT_THAT(Error(), HasSubstr("--spill: KV goes from memory of the host to a disk"));
}

TEST_F(CheckConfigTest, WhateverBringsSeveralCallersIsSeen) {
  EXPECT_FALSE(MayHaveSeveralCallers(config_)) << "one user on one machine";
  const auto with = [this](const std::function<void(ServeConfig&)>& change) {
    ServeConfig config = config_;
    change(config);
    return MayHaveSeveralCallers(config);
  };
  EXPECT_FALSE(with([](ServeConfig& c) { c.http = "off"; }));
  EXPECT_FALSE(with([](ServeConfig& c) { c.listen = "[::1]:1"; }));
  EXPECT_FALSE(with([](ServeConfig& c) { c.metrics = "0.0.0.0:9464"; })) << "asks nothing";
  EXPECT_TRUE(with([](ServeConfig& c) { c.listen = "0.0.0.0:50051"; }));
  EXPECT_TRUE(with([](ServeConfig& c) { c.http = "10.0.0.1:8000"; }));
  EXPECT_TRUE(with([](ServeConfig& c) { c.http = "[::]:8000"; }));
  EXPECT_TRUE(with([](ServeConfig& c) { c.api_keys = "keys"; }));
  EXPECT_TRUE(with([](ServeConfig& c) { c.tenants = "tenants"; }));
  EXPECT_TRUE(with([](ServeConfig& c) { c.tls_client_ca = "ca"; }));
  EXPECT_TRUE(with([](ServeConfig& c) { c.kv_events = "on"; }));
}

TEST_F(CheckConfigTest, MetricsHaveNoIpv6) {
  config_.listen = "[::1]:1";
  EXPECT_TRUE(CheckConfig(config_).ok());
  config_.metrics = "[::1]:2";
  EXPECT_THAT(Error(), HasSubstr("--metrics [::1]:2: metrics are served over IPv4"));
}

TEST_F(CheckConfigTest, AContextHasRoomForAPromptAndAnAnswer) {
  config_.max_context = 1;
  EXPECT_THAT(Error(), HasSubstr("--max-context 1"));
  config_.max_context = 2;
  EXPECT_TRUE(CheckConfig(config_).ok());
}

TEST_F(CheckConfigTest, WhatOnlySlowerTiersHaveIsRefusedWithoutThem) {
  const auto refused = [this](std::string ServeConfig::*field, const char* value) {
    config_.*field = value;
    std::string error = Error();
    config_.*field = ServeConfig().*field;
    return error;
  };
  EXPECT_THAT(refused(&ServeConfig::prefetch, "on"), HasSubstr("--prefetch: there is no slower"));
  EXPECT_THAT(refused(&ServeConfig::resume, "lazy"), HasSubstr("--resume: there is no slower"));
  EXPECT_THAT(refused(&ServeConfig::io, "threads"), HasSubstr("--io: there are no files"));
  EXPECT_THAT(refused(&ServeConfig::store_dir, "/x"), HasSubstr("store_dir: needs disk_bytes"));
  config_.row_cache_bytes = 1;
  EXPECT_THAT(Error(), HasSubstr("--row-cache-bytes: there is no slower"));
  config_.host_bytes = int64_t{1} << 30;
  config_.prefetch = "on";
  config_.resume = "eager";
  EXPECT_TRUE(CheckConfig(config_).ok()) << CheckConfig(config_);
  config_.disk_bytes = int64_t{1} << 30;
  EXPECT_THAT(Error(), HasSubstr("disk_bytes: needs store_dir"));
  config_.store_dir = "/x";
  config_.io = "uring";
  EXPECT_TRUE(CheckConfig(config_).ok()) << CheckConfig(config_);
}

TEST_F(CheckConfigTest, KvEventsNeedEachOtherAndAPlaceOfTheirOwn) {
  config_.kv_events_zmq = "127.0.0.1:5557";
  EXPECT_THAT(Error(), HasSubstr("--kv-events-zmq needs --kv-events on"));
  config_.kv_events = "on";
  EXPECT_EQ(Error(), "");
  config_.kv_events_replay = "127.0.0.1:5557";
  EXPECT_THAT(Error(), HasSubstr("--kv-events-zmq and --kv-events-replay are both"));
  config_.kv_events_replay = config_.listen;
  EXPECT_THAT(Error(), HasSubstr("--kv-events-replay"));
  config_.kv_events_replay = "127.0.0.1:5558";
  EXPECT_EQ(Error(), "");
  config_.kv_events_replay = "0.0.0.0:5558";
  EXPECT_THAT(Error(), HasSubstr("--insecure"));
  config_.insecure = true;
  EXPECT_EQ(Error(), "");
  config_.prefix_cache = "off";
  EXPECT_THAT(Error(), HasSubstr("--prefix-cache is off"));
  config_.prefix_cache = "on";
  config_.kv_events_zmq = "off";
  EXPECT_THAT(Error(), HasSubstr("--kv-events-replay needs --kv-events-zmq"));
  config_.kv_events_replay = "off";
  config_.kv_events_topic = "kv@a@b";
  EXPECT_THAT(Error(), HasSubstr("--kv-events-topic needs --kv-events-zmq"));
}

TEST_F(CheckConfigTest, HttpHasGrpcsRuleAboutTheNetworkAndAPortOfItsOwn) {
  config_.http = "0.0.0.0:8000";
  EXPECT_THAT(Error(), HasSubstr("--http 0.0.0.0:8000 can be reached from the network"));
  config_.insecure = true;
  EXPECT_TRUE(CheckConfig(config_).ok()) << CheckConfig(config_);
  config_.insecure = false;
  config_.tls_cert = config_.tls_key = "/x";
  EXPECT_TRUE(CheckConfig(config_).ok()) << CheckConfig(config_);
  config_.http = config_.listen;
  EXPECT_THAT(Error(), HasSubstr("--http and --listen are both"));
  config_.http = config_.metrics;
  EXPECT_THAT(Error(), HasSubstr("--metrics and --http are both"));
  config_.http = "off";
  config_.api_keys = "/keys";
}

TEST_F(CheckConfigTest, BoundsThatContradictEachOtherAreRefused) {
  config_.max_running = 100;
  config_.step_tokens = 99;
  EXPECT_THAT(Error(), HasSubstr("--max-running 100 exceeds --step-tokens 99"));
  config_.step_tokens = 100;
  config_.prompt_step_tokens = 99;
  EXPECT_THAT(Error(), HasSubstr("--prompt-step-tokens 99 is less than --step-tokens 100"));
  config_.prompt_step_tokens = 100;
  EXPECT_TRUE(CheckConfig(config_).ok());
  config_.block_tokens = 48;
  EXPECT_THAT(Error(), HasSubstr("power of two"));
  config_.block_tokens = 64;
  config_.metrics = config_.listen;
  EXPECT_THAT(Error(), HasSubstr("--metrics and --listen"));
}

TEST(UnknownEnvironment, NamesWhatIsNoOptionWithTheNearestOne) {
  const char* const environ[] = {"PATH=/bin",
                                 "WINNOW_THREADS=2",
                                 "WINNOW_THREDS=2",
                                 "WINNOW_CONFIG=x",
                                 "WINNOW_ZZZZZZZZZZ=",
                                 "WINNOW_KV_BYTE=1",
                                 "WINNOW_PORT=tcp://10.0.0.1:1",
                                 "WINNOW_SERVICE_HOST=10.0.0.1",
                                 "WINNOW_PORT_80_TCP_ADDR=10.0.0.1",
                                 "XWINNOW_THREDS=1",
                                 "WINNOW_",
                                 nullptr};
  const std::vector<std::string> unknown = UnknownEnvironment(environ);
  ASSERT_EQ(unknown.size(), 4u);
  EXPECT_EQ(unknown[0],
            "environment variable WINNOW_THREDS is no option of winnow serve: did you mean "
            "WINNOW_THREADS?");
  EXPECT_EQ(unknown[1], "environment variable WINNOW_ZZZZZZZZZZ is no option of winnow serve");
  EXPECT_EQ(unknown[2],
            "environment variable WINNOW_KV_BYTE is no option of winnow serve: did you mean "
            "WINNOW_KV_BYTES?");
  EXPECT_EQ(unknown[3].find("environment variable WINNOW_ is no option"), 0u);
}

}  // namespace
}  // namespace winnow::server
