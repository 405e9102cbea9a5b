#include "engine/kv/block_name.h"

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

TEST(BlockNameTest, Sha256IsTheStandards) {
  std::string hex;
  for (const uint8_t byte : Sha256("abc")) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  EXPECT_EQ(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(BlockNameTest, WhateverDecidesTheBytesDecidesTheName) {
  const Digest model = Sha256("model"), tenant = Sha256("tenant"), other = Sha256("other");
  const std::vector<int32_t> tokens = {1, 2, 3, 4}, changed = {1, 2, 3, 5}, shorter = {1, 2, 3};
  const Digest root = ChainRoot(model, tenant);
  const std::set<Digest> names = {
      root,
      ChainRoot(other, tenant),
      ChainRoot(model, other),
      ChainNext(root, tokens, ""),
      ChainNext(root, changed, ""),
      ChainNext(root, shorter, ""),
      ChainNext(root, tokens, "window from 3"),
      ChainNext(ChainRoot(other, tenant), tokens, ""),
      ChainNext(ChainNext(root, tokens, ""), tokens, ""),
  };
  EXPECT_EQ(names.size(), 9u);
  EXPECT_EQ(ChainNext(root, tokens, ""), ChainNext(ChainRoot(model, tenant), tokens, ""));
}

TEST(BlockNameTest, SaltsOfEachKindAreApartAndATenantsIsAsItEverWas) {
  // KV that earlier versions stored is found under this.
  EXPECT_EQ(TenantSalt("abc"), Sha256("abc"));
  const std::set<Digest> salts = {TenantSalt(""),  TenantSalt("a"), TenantSalt("b"),
                                  DomainSalt("a"), DomainSalt("b"), CallSalt(1),
                                  CallSalt(2)};
  EXPECT_EQ(salts.size(), 7u);
}

// Another function than the chain's, of all that the chain is of.
TEST(BlockNameTest, ACheckIsOfTokensAndHowAndWhatCameBefore) {
  const std::vector<int32_t> tokens = {1, 2, 3};
  const std::set<uint32_t> checks = {CheckNext(0, tokens, ""),
                                     CheckNext(1, tokens, ""),
                                     CheckNext(0, tokens, "x"),
                                     CheckNext(0, std::vector<int32_t>{1, 2}, ""),
                                     CheckNext(0, std::vector<int32_t>{1, 2, 4}, ""),
                                     CheckNext(0, {}, "")};
  EXPECT_EQ(checks.size(), 6u);
  EXPECT_EQ(CheckNext(0, tokens, ""), CheckNext(0, tokens, ""));
  uint32_t of_chain = 0;
  const Digest chain = ChainNext({}, tokens, "");
  std::memcpy(&of_chain, chain.data(), sizeof of_chain);
  EXPECT_NE(CheckNext(0, tokens, ""), of_chain);
}

TEST(BlockNameTest, AnIdSaysWhatTheBlockIsOf) {
  const StoreNames names{.model = Sha256("model"), .retrieval = ""};
  const BlockName name{Sha256("chain"), Sha256("tenant"), 7, 5};
  const storage::BlockId id = names.Id(name, 0, 3);
  EXPECT_EQ(id.model, names.model);
  EXPECT_EQ(id.tenant, name.tenant);
  EXPECT_EQ(id.layer, 3u);
  EXPECT_EQ(id.token_block, 7u + (uint64_t{5} << 32));
  EXPECT_FALSE(id.key == names.Id(name, 0, 2).key);
  EXPECT_FALSE(id.key == names.Id(name, 1, 3).key);
}

}  // namespace
}  // namespace winnow::engine
