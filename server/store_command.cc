// `winnow store`: looks at, checks, repairs and cleans up a store's directory, without a server.
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "server/commands.h"
#include "storage/maintenance.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

struct Flags {
  std::string dir;
  bool json = false;
  double min_live = 0.5;
  double read_deadline_s = 30;
};

storage::MaintenanceOptions OptionsOf(const Flags& flags) {
  storage::MaintenanceOptions options;
  options.directory = flags.dir;
  options.read_deadline_ns = static_cast<int64_t>(flags.read_deadline_s * 1e9);
  options.log = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  return options;
}

int Report(const absl::Status& status) {
  std::fprintf(stderr, "winnow store: %s\n", std::string(status.message()).c_str());
  return absl::IsNotFound(status) ? kExitUsage : kExitFailure;
}

std::string Size(uint64_t bytes) {
  if (bytes < 10 << 20) return fmt::format("{:.1f} KiB", static_cast<double>(bytes) / 0x1p10);
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / 0x1p20);
}

void Line(const char* name, const std::string& text) {
  std::printf("%-12s %s\n", name, text.c_str());
}

void PrintJson(const OrderedJson& json) { std::cout << json.dump(2) << std::endl; }

const char* FoundName(storage::EraseLog::Found found) {
  switch (found) {
    case storage::EraseLog::Found::kSound:
      return "sound";
    case storage::EraseLog::Found::kMissing:
      return "missing";
    case storage::EraseLog::Found::kDamaged:
      return "damaged";
  }
  return "";
}

OrderedJson InspectionJson(const Flags& flags, const storage::StoreInspection& seen) {
  return {{"directory", flags.dir},
          {"owner", seen.owner},
          {"segments", seen.segments},
          {"sealed_segments", seen.sealed_segments},
          {"unsound_segments", seen.unsound_segments},
          {"segment_bytes", seen.segment_bytes},
          {"file_bytes", seen.file_bytes},
          {"index", seen.index_error.empty() ? "readable" : seen.index_error},
          {"blocks", seen.blocks},
          {"live_bytes", seen.live_bytes},
          {"payload_bytes", seen.payload_bytes},
          {"pinned_blocks", seen.pinned_blocks},
          {"pinned_bytes", seen.pinned_bytes},
          {"expiring_blocks", seen.expiring_blocks},
          {"blocks_by_priority", seen.blocks_by_priority},
          {"dangling_entries", seen.dangling_entries},
          {"erase_list", FoundName(seen.erase_log)},
          {"erasures", seen.erasures}};
}

void PrintInspection(const Flags& flags, const storage::StoreInspection& seen) {
  Line("directory", flags.dir);
  Line("owner", seen.owner.empty() ? "none" : seen.owner);
  Line("segments",
       fmt::format("{} ({} sealed) of {}, {} in files", seen.segments, seen.sealed_segments,
                   Size(seen.segment_bytes), Size(seen.file_bytes)));
  const double share = seen.file_bytes == 0 ? 0
                                            : 100 * static_cast<double>(seen.live_bytes) /
                                                  static_cast<double>(seen.file_bytes);
  Line("blocks", fmt::format("{}, {} of payload, {} live ({:.1f} % of the files)", seen.blocks,
                             Size(seen.payload_bytes), Size(seen.live_bytes), share));
  Line("pinned", fmt::format("{}, {}", seen.pinned_blocks, Size(seen.pinned_bytes)));
  Line("expiring", fmt::format("{}", seen.expiring_blocks));
  std::string priorities;
  for (size_t i = 0; i < seen.blocks_by_priority.size(); ++i) {
    priorities += fmt::format("{}{} at {}", i == 0 ? "" : ", ", seen.blocks_by_priority[i], i);
  }
  Line("priority", priorities);
  Line("index", seen.index_error.empty()
                    ? fmt::format("readable, {} entries without a block", seen.dangling_entries)
                    : seen.index_error);
  Line("erased", fmt::format("{} listed, list {}", seen.erasures, FoundName(seen.erase_log)));
}

int Stat(const Flags& flags) {
  const auto seen = storage::StatStore(OptionsOf(flags));
  if (!seen.ok()) return Report(seen.status());
  if (flags.json) {
    PrintJson(InspectionJson(flags, *seen));
  } else {
    PrintInspection(flags, *seen);
  }
  return kExitOk;
}

int Verify(const Flags& flags) {
  const storage::SystemClock clock;
  const auto seen = storage::VerifyStore(OptionsOf(flags), &clock);
  if (!seen.ok()) return Report(seen.status());
  if (flags.json) {
    OrderedJson json = InspectionJson(flags, *seen);
    json["checked_blocks"] = seen->checked_blocks;
    json["corrupt_blocks"] = seen->corrupt_blocks;
    json["unreadable_blocks"] = seen->unreadable_blocks;
    json["unchecked_blocks"] = seen->unchecked_blocks;
    json["findings"] = seen->findings;
    json["finding_count"] = seen->finding_count;
    json["sound"] = seen->sound();
    PrintJson(json);
  } else {
    PrintInspection(flags, *seen);
    Line("checked",
         fmt::format("{} sound, {} corrupt, {} unreadable, {} not checked", seen->checked_blocks,
                     seen->corrupt_blocks, seen->unreadable_blocks, seen->unchecked_blocks));
    for (const std::string& finding : seen->findings) Line("unsound", finding);
    if (seen->finding_count > seen->findings.size()) {
      Line("", fmt::format("and {} more", seen->finding_count - seen->findings.size()));
    }
    Line("verdict", seen->sound() ? "sound" : "unsound; winnow store repair forgets what is");
  }
  return seen->sound() ? kExitOk : kExitFailure;
}

OrderedJson RecoveryJson(const storage::RecoveryReport& recovery) {
  return {{"index_rebuilt", recovery.index_rebuilt},
          {"quarantined", recovery.quarantined},
          {"dropped_entries", recovery.dropped_entries},
          {"hidden_blocks", recovery.hidden_blocks},
          {"removed_segments", recovery.removed_segments},
          {"truncated_bytes", recovery.truncated_bytes}};
}

void PrintRecovery(const storage::RecoveryReport& recovery) {
  Line("index", fmt::format("{}{}, {} entries dropped, {} erased blocks left out",
                            recovery.index_rebuilt ? "rebuilt" : "kept",
                            recovery.quarantined.empty() ? "" : ", the old one in quarantine/",
                            recovery.dropped_entries, recovery.hidden_blocks));
  Line("segments", fmt::format("{} removed, {} bytes cut off", recovery.removed_segments,
                               recovery.truncated_bytes));
}

int Repair(const Flags& flags) {
  const storage::SystemClock clock;
  const auto report = storage::RepairStore(OptionsOf(flags), &clock);
  if (!report.ok()) return Report(report.status());
  const storage::VerifyReport& verify = report->verify;
  if (flags.json) {
    PrintJson({{"directory", flags.dir},
               {"recovery", RecoveryJson(report->recovery)},
               {"corrupt_blocks", verify.corrupt_blocks},
               {"unreadable_blocks", verify.unreadable_blocks},
               {"unchecked_blocks", verify.unchecked_blocks},
               {"removed_blocks", verify.removed_blocks},
               {"blocks", report->blocks},
               {"file_bytes", report->used_bytes}});
  } else {
    Line("directory", flags.dir);
    PrintRecovery(report->recovery);
    Line("blocks", fmt::format("{} corrupt, {} unreadable, {} not checked; {} forgotten",
                               verify.corrupt_blocks, verify.unreadable_blocks,
                               verify.unchecked_blocks, verify.removed_blocks));
    Line("left", fmt::format("{} blocks, {}", report->blocks, Size(report->used_bytes)));
  }
  return verify.unchecked_blocks == 0 ? kExitOk : kExitFailure;
}

int Collect(const Flags& flags) {
  const storage::SystemClock clock;
  const auto report = storage::CollectStore(OptionsOf(flags), flags.min_live, &clock);
  if (!report.ok()) return Report(report.status());
  if (flags.json) {
    PrintJson({{"directory", flags.dir},
               {"recovery", RecoveryJson(report->recovery)},
               {"expired_blocks", report->gc.expired_blocks},
               {"freed_bytes", report->gc.freed_bytes},
               {"blocks", report->blocks},
               {"file_bytes", report->used_bytes}});
  } else {
    Line("directory", flags.dir);
    PrintRecovery(report->recovery);
    Line("expired", fmt::format("{} blocks", report->gc.expired_blocks));
    Line("freed", Size(report->gc.freed_bytes));
    Line("left", fmt::format("{} blocks, {}", report->blocks, Size(report->used_bytes)));
  }
  return kExitOk;
}

}  // namespace

void AddStoreCommand(CLI::App& app, int* exit_code) {
  CLI::App* store = app.add_subcommand("store", "Look at, check, repair or clean up a KV store");
  store->require_subcommand(1);
  auto flags = std::make_shared<Flags>();
  const auto add = [&](const char* name, const char* what, int (*work)(const Flags&)) {
    CLI::App* command = store->add_subcommand(name, what);
    command->add_option("--dir,--store", flags->dir, "The store's directory")
        ->required()
        ->type_name("DIR");
    command->add_flag("--json", flags->json, "Print one JSON object");
    command->callback([flags, exit_code, work] { *exit_code = work(*flags); });
    return command;
  };
  add("stat", "What the store holds; writes nothing, also while a server uses it", Stat);
  CLI::App* verify = add(
      "verify", "Read and check every block; writes nothing, needs the store to itself", Verify);
  verify
      ->add_option("--read-deadline", flags->read_deadline_s,
                   "Seconds after which a read is given up, and its segment with it")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  verify->footer(
      "Exit codes: 0 sound; 1 something is unsound, or the store is in use; 2 no store.");
  add("repair", "Rebuild a lost index and forget every block that is not sound", Repair);
  add("gc", "Drop expired blocks and give back the room of dead ones", Collect)
      ->add_option("--min-live", flags->min_live,
                   "Empty segments of which less than this share is live; 1 leaves no dead byte")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
}

}  // namespace winnow::server
