#include "kernels/cpu/cpu_backend.h"

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <vector>

#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

TEST(CpuBackendTest, AnUnknownInstructionSetIsRefused) {
  for (const char* isa : {"", "AVX2", "avx", "avx1024", "neon", "auto "}) {
    EXPECT_EQ(MakeCpuBackend(isa, 1), nullptr) << isa;
  }
}

TEST(CpuBackendTest, AutoIsTheBestThatTheProcessorHas) {
  const std::string best = AvailableIsas().back();
  EXPECT_EQ(MakeCpuBackend("auto", 2)->name(), MakeCpuBackend(best, 2)->name());
  EXPECT_NE(MakeCpuBackend("scalar", 1), nullptr);
}

TEST(CpuBackendTest, TheInstructionSetsAreThoseThatTheSystemReports) {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line) && line.rfind("flags", 0) != 0) {
  }
  ASSERT_FALSE(line.empty()) << "no flags in /proc/cpuinfo";
  line += " ";
  auto has = [&](const std::string& flag) {
    return line.find(" " + flag + " ") != std::string::npos;
  };
  const bool avx2 = has("avx2") && has("fma") && has("f16c") && has("bmi1") && has("bmi2");
  const bool avx512 = avx2 && has("avx512f") && has("avx512bw") && has("avx512vl") &&
                      has("avx512dq") && has("avx512_bf16") && has("avx512_vnni") &&
                      has("avx512_vpopcntdq");
  EXPECT_EQ(MakeCpuBackend("avx2", 1) != nullptr, avx2);
  EXPECT_EQ(MakeCpuBackend("avx512", 1) != nullptr, avx512);
  EXPECT_EQ(MakeCpuBackend("amx", 1) != nullptr,
            avx512 && has("amx_tile") && has("amx_bf16") && has("amx_int8"));
}

TEST(CpuBackendTest, ItsNameSaysInstructionSetAndThreads) {
  EXPECT_EQ(MakeCpuBackend("scalar", 1)->name(), "cpu (scalar, 1 thread)");
  EXPECT_EQ(MakeCpuBackend("scalar", 3)->name(), "cpu (scalar, 3 threads)");
  EXPECT_EQ(MakeCpuBackend("scalar", 0)->name(),
            MakeCpuBackend("scalar", UsableProcessors())->name());
}

// Bytes of the process that are in memory.
size_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Where the system has huge pages for whoever asks, a buffer's last one is not taken whole for a part of it: matrices of experts
// are that small, and many.
TEST(CpuBackendTest, MemoryThatIsTakenIsOfTheBuffersSize) {
  const auto backend = MakeCpuBackend("auto", 1);
  constexpr size_t kCount = 64, kBytes = (size_t{2} << 20) + (size_t{64} << 10);
  std::vector<Buffer> buffers;
  const size_t before = ResidentBytes();
  for (size_t i = 0; i < kCount; ++i) {
    buffers.push_back(backend->Allocate(kBytes));
    std::memset(buffers.back().data(), 1, kBytes);
  }
  EXPECT_LT(ResidentBytes() - before, kCount * kBytes * 5 / 4);
}

TEST(CpuBackendTest, MemoryIsZeroedAlignedAndOfItsSize) {
  const auto backend = MakeCpuBackend("auto", 1);
  for (const size_t size_bytes : {size_t{0}, size_t{1}, size_t{100}, size_t{1} << 20,
                                  (size_t{2} << 20) - 1, size_t{2} << 20, size_t{5000001}}) {
    const Buffer buffer = backend->Allocate(size_bytes);
    ASSERT_NE(buffer.data(), nullptr) << size_bytes;
    EXPECT_EQ(buffer.size_bytes(), size_bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    std::byte* bytes = static_cast<std::byte*>(buffer.data());
    for (size_t i = 0; i < size_bytes; i += 997) ASSERT_EQ(bytes[i], std::byte{0});
    if (size_bytes > 0) {
      ASSERT_EQ(bytes[size_bytes - 1], std::byte{0});
      std::memset(bytes, 0x5a, size_bytes);
    }
  }
}

TEST(CpuBackendTest, MemoryThatCannotBeHadIsNull) {
  const auto backend = MakeCpuBackend("auto", 1);
  EXPECT_EQ(backend->Allocate(size_t{1} << 60).data(), nullptr);
  EXPECT_EQ(backend->Allocate(SIZE_MAX).data(), nullptr);
}

TEST(CpuBackendTest, CopiesGoBothWays) {
  const auto backend = MakeCpuBackend("auto", 1);
  const Buffer buffer = backend->Allocate(300);
  std::vector<uint8_t> from(300), to(300);
  for (size_t i = 0; i < 300; ++i) from[i] = static_cast<uint8_t>(i * 7);
  backend->CopyToDevice(from.data(), buffer.data(), 300);
  backend->CopyToHost(buffer.data(), to.data(), 300);
  EXPECT_EQ(from, to);
}

TEST(CpuBackendDeathTest, OurOwnBugsStopTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto backend = MakeCpuBackend("scalar", 1);
  Random random;
  const FileMatrix w(random, 4, 8, DType::kF32);
  Matrix x(1, 7), y(1, 4);
  const HostMatrix host = w.host();
  const auto packed = backend->Pack({&host, 1}, DType::kF32);
  EXPECT_DEATH(backend->Matmul(x.tensor(), *packed, y.tensor(), {}), "CHECK failed");
  const std::vector<int32_t> ids = {4};
  Matrix out(1, 8);
  EXPECT_DEATH(backend->EmbedRows(host, ids, 1.0f, out.tensor()), "CHECK failed");
}

}  // namespace
}  // namespace winnow::kernels
