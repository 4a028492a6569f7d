// The table of addresses, compared with std::unordered_map: for addresses as allocators give them out, neighbours and
// distant ones, and for those that would meet in one slot.
#include "binding/address_table.h"

#include <functional>
#include <unordered_map>

#include "simulation.h"
#include "testing.h"

namespace fastpersist {
namespace {

void CompareWithUnorderedMap(const std::vector<uintptr_t>& addresses, size_t expected_count,
                             const std::string& detail) {
  AddressTable table;
  table.Expect(expected_count);
  std::unordered_map<uintptr_t, uint32_t> model;
  std::vector<uintptr_t> in_order;
  for (uint32_t number = 0; number < addresses.size(); ++number) {
    const uintptr_t address = addresses[number];
    const auto [expected, is_new] = model.emplace(address, number);
    if (is_new) in_order.push_back(address);
    if (!EXPECT_WITH((table.Find(address) == nullptr) == is_new, detail)) return;
    if (!EXPECT_WITH(table.FindOrAdd(address, number) == std::pair(expected->second, is_new), detail)) return;
  }
  for (const auto& [address, number] : model) {
    const uint32_t* const found = table.Find(address);
    if (!EXPECT_WITH(found != nullptr && *found == number, detail)) return;
    if (!EXPECT_WITH(model.contains(address + 16) == (table.Find(address + 16) != nullptr), detail)) return;
  }
  std::vector<uintptr_t> visited;
  table.ForEachAddress([&](uintptr_t address) { visited.push_back(address); });
  EXPECT_WITH(visited == in_order && table.count() == in_order.size(), detail);
}

void CompareForAnyExpectation(size_t count, const std::function<uintptr_t(size_t)>& address_of,
                              const std::string& detail) {
  std::vector<uintptr_t> addresses;
  for (size_t i = 0; i < count; ++i) addresses.push_back(address_of(i));
  for (const size_t expected_count : {size_t{0}, count / 3, count}) {
    CompareWithUnorderedMap(addresses, expected_count, detail + ", expected " + std::to_string(expected_count));
  }
}

constexpr uintptr_t kHeap = 0x7F12345000;

void NeighboursAreFound() {
  for (const size_t stride : {16, 32, 48, 64, 80, 1104, 4096}) {
    CompareForAnyExpectation(
        100'000, [stride](size_t i) { return kHeap + (i * stride); }, "stride " + std::to_string(stride));
  }
}

void AddressesOfOnePlaceInTheirNeighbourhoodAreFound() {
  for (const size_t stride_mib : {1, 2, 16, 1024}) {
    CompareForAnyExpectation(
        20'000, [stride_mib](size_t i) { return kHeap + (i * stride_mib << 20); },
        "stride " + std::to_string(stride_mib) + " MiB");
  }
}

// If neighbourhoods that fill the same slots were searched one address after the other, this would take longer than a
// test may.
void FullNeighbourhoodsMayMeet() {
  CompareForAnyExpectation(
      1'000'000, [](size_t i) { return kHeap + ((i % 500) << 40) + ((i / 500) * 64); }, "500 neighbourhoods");
}

void RandomAddressesAreFound() {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    CompareForAnyExpectation(
        5000, [&](size_t) { return kHeap + (random.Below(4000) * 16); }, "seed " + std::to_string(seed));
    CompareForAnyExpectation(5000, [&](size_t) { return random.Next() | 1; }, "seed " + std::to_string(seed));
  }
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(NeighboursAreFound), TEST(AddressesOfOnePlaceInTheirNeighbourhoodAreFound),
              TEST(FullNeighbourhoodsMayMeet), TEST(RandomAddressesAreFound)});
}
