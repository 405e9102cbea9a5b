#include "tests/unit/kernels/guarded_array.h"

#include "gtest/gtest.h"

namespace winnow::kernels {
namespace {

TEST(GuardedArrayDeathTest, TheValueBehindTheLastIsAFault) {
  for (const size_t size : {1, 3, 1023, 1024, 1025}) {
    GuardedArray<float> array(size, 2.0f);
    EXPECT_EQ(array.data()[0], 2.0f);
    EXPECT_EQ(array.data()[size - 1], 2.0f);
    EXPECT_DEATH(static_cast<volatile float*>(array.data())[size] = 1.0f, "");
    EXPECT_DEATH(static_cast<void>(static_cast<const volatile float*>(array.data())[size]), "");
  }
}

TEST(GuardedArrayTest, CopiesAreApart) {
  GuardedArray<int> one(5, 7);
  GuardedArray<int> other = one;
  other.data()[4] = 8;
  EXPECT_EQ(one.data()[4], 7);
  one = std::move(other);
  EXPECT_EQ(one.data()[4], 8);
  EXPECT_EQ(one.size(), 5u);
  EXPECT_EQ(GuardedArray<int>().size(), 0u);
}

}  // namespace
}  // namespace winnow::kernels
