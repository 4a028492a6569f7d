// GPUDirect Storage (device/cufile.h) over the doubles of libcufile and of the driver (tests/support/cuda_double): it
// finds and opens the library once or says why not, registers and frees device memory in order, and reports only ways
// that the library has counted. cufile_engine_test checks how bytes move.
#include "device/cufile.h"

#include <fcntl.h>

#include <array>
#include <utility>

#include "testing_cufile.h"

namespace fastpersist {
namespace {

// --- finding and opening the library ---

void WithoutADriverTheReasonNamesIt() {
  if (CudaDriver::Present().ok()) return;  // a machine that has one
  const Status status = CuFile::Get().status();
  EXPECT(status.code() == StatusCode::kUnsupported);
  EXPECT_WITH(Contains(status.message(), "driver"), status.message());
  EXPECT(CreateEngine({.name = "cufile"}).status().message() == status.message());
}

void WithoutALibraryTheReasonSaysWhatWasTriedAndWhatToInstall() {
  Cuda();
  void* const system = dlopen("libcufile.so.0", RTLD_LAZY);
  if (system != nullptr) return;  // a machine that has one
  CuFile::Configure("/nowhere/libcufile.so.0", 0);
  const Status status = CuFile::Get().status();
  EXPECT(status.code() == StatusCode::kUnsupported);
  EXPECT_WITH(Contains(status.message(), "/nowhere/libcufile.so.0") && Contains(status.message(), "nvidia-cufile"),
              status.message());
}

void TheLibraryIsFoundByItsPath() {
  Cuda();
  CuFile::Configure(NewLibrary(), 0);
  EXPECT(Must(CuFile::Get())->version() == 1160);
  EXPECT(Double().call_count("cuFileDriverOpen") == 1);
}

void TheLibraryOfTheProcessGoesBeforeTheOneOfThePath() {
  Double();
  CuFile::Configure(OldLibrary(), 0);
  EXPECT(Must(CuFile::Get())->version() == 1160);
}

void ALibraryThatRefusesToOpenSaysWhyAndIsTriedAgain() {
  Double().fail("cuFileDriverOpen", 1, 5004);
  const Status status = CuFile::Get().status();
  EXPECT(status.code() == StatusCode::kUnsupported);
  EXPECT_WITH(Contains(status.message(), "CU_FILE_DRIVER_VERSION_MISMATCH (5004)"), status.message());
  EXPECT_OK(CuFile::Get().status());
  EXPECT(Double().call_count("cuFileDriverOpen") == 2);
}

void ALibraryThatSomebodyElseHasOpenedIsUsed() {
  Double().fail("cuFileDriverOpen", 1, 5026);
  EXPECT_OK(CuFile::Get().status());
  EXPECT(Double().call_count("cuFileDriverOpen") == 1);
}

void ItIsOpenedOnceForAllEngines() {
  Double();
  CuFile* const cufile = Must(CuFile::Get());
  NewEngine();
  NewEngine();
  EXPECT(Must(CuFile::Get()) == cufile);
  EXPECT(Double().call_count("cuFileDriverOpen") == 1);
}

// --- memory of the device ---

void BuffersOfAStagingAreaAreApartAndComeBack() {
  Double();
  {
    const auto staging = NewStaging(3);
    EXPECT(staging->buffer_count() == 3 && staging->buffer_bytes() == kBufferBytes && staging->free_count() == 3);
    std::vector<std::byte*> buffers;
    while (std::byte* const buffer = staging->Take()) buffers.push_back(buffer);
    EXPECT(buffers.size() == 3 && staging->free_count() == 0);
    for (size_t i = 0; i < buffers.size(); ++i) {
      EXPECT(AddressOf(buffers[i]) % DeviceStaging::kBufferAlignment == 0);
      Fill(buffers[i], Bytes(kBufferBytes, static_cast<std::byte>(i + 1)));
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
      EXPECT(BytesOf(buffers[i]) == Bytes(kBufferBytes, static_cast<std::byte>(i + 1)));
    }
    const auto place = DeviceStaging::Find(buffers[1] + 4096);
    EXPECT(place.has_value() && place->base + place->offset_bytes == buffers[1] + 4096);
    EXPECT(place.has_value() && place->device == &TheDevice());
    for (std::byte* const buffer : buffers) staging->Put(buffer);
    EXPECT(staging->free_count() == 3);
    EXPECT(Double().buffer_count() == 1);
  }
  ExpectNothingLeft();
}

void WhatIsInNoStagingAreaIsNotFound() {
  Double();
  const std::byte on_the_stack = {};
  const auto other = Cuda().alloc(4096);
  const auto staging = NewStaging();
  EXPECT(!DeviceStaging::Find(&on_the_stack).has_value());
  EXPECT(!DeviceStaging::Find(reinterpret_cast<const std::byte*>(other)).has_value());
  std::byte* const first = staging->Take();
  const auto place = DeviceStaging::Find(first);
  EXPECT(place.has_value());
  if (!place.has_value()) return;
  EXPECT(!DeviceStaging::Find(place->base - 1).has_value());
  EXPECT(DeviceStaging::Find(place->base + place->left_bytes - 1).has_value());
  EXPECT(!DeviceStaging::Find(place->base + place->left_bytes).has_value());
  staging->Put(first);
}

void AStagingAreaThatIsRefusedLeavesNothing() {
  Double();
  Cuda().fail("cuMemAlloc_v2", 1, 2);
  Status status = DeviceStaging::Create(TheDevice(), 2, kBufferBytes).status();
  EXPECT_WITH(status.code() == StatusCode::kDeviceError && Contains(status.message(), "OUT_OF_MEMORY"),
              status.message());
  Double().fail("cuFileBufRegister", 1, 5016);
  status = DeviceStaging::Create(TheDevice(), 2, kBufferBytes).status();
  EXPECT_WITH(status.code() == StatusCode::kUnsupported && Contains(status.message(), "CU_FILE_INVALID_MAPPING_SIZE"),
              status.message());
  ExpectNothingLeft();
  NewStaging();
  ExpectNothingLeft();
}

void MemoryThatStaysRegisteredIsNotFreed() {
  Double();
  auto staging = NewStaging();
  Double().fail("cuFileBufDeregister", 1, 5030);
  staging.reset();
  EXPECT(Cuda().allocation_count() == 1);
  EXPECT(Cuda().call_count("cuMemFree_v2") == 0);
}

// --- the truth about the way ---

template <int kVersion>
void TrafficIsCountedByTheWayThatTheLibraryTellsOf() {
  Double().set_version(kVersion);
  ScratchFile file("ways");
  const auto staging = NewStaging();
  const auto engine = NewEngine();
  std::byte* const buffer = staging->Take();
  const auto traffic = [] { return Must(Must(CuFile::Get())->Traffic()); };
  EXPECT(traffic().p2p_count == 0 && traffic().nvfs_count == 0 && traffic().posix_count == 0);
  const std::array ways = {std::pair(kSaysPosix, 1), std::pair(kSaysNvfs, 2), std::pair(kSaysP2p, 3)};
  for (const auto& [way, count] : ways) {
    Double().set_way(way);
    for (int i = 0; i < count; ++i) {
      EXPECT(RunOne(*engine, Request(IoOp::kWrite, file.fd(), buffer)).sys_errno == 0);
    }
    EXPECT(RunOne(*engine, Request(IoOp::kRead, file.fd(), buffer)).sys_errno == 0);
  }
  EXPECT(traffic().posix_count == 2 && traffic().nvfs_count == 3 && traffic().p2p_count == 4);
  staging->Put(buffer);
}

void StatisticsThatAreNotUnderstoodAreUnknown() {
  Double();
  CuFile& cufile = *Must(CuFile::Get());
  for (const int oddity : {kGrown, kLeftOut, kDisabled, kAbsurd}) {
    Double().set_oddity(oddity);
    const Status status = cufile.Traffic().status();
    EXPECT_WITH(status.code() == StatusCode::kUnsupported, "oddity " + std::to_string(oddity));
  }
  Double().set_oddity(kAsDocumented);
  EXPECT_OK(cufile.Traffic().status());
}

template <int kVersion>
void StatisticsOfAVersionWithoutAKnownLayoutAreUnknown() {
  Double().set_version(kVersion);
  const Status status = Must(CuFile::Get())->Traffic().status();
  EXPECT_WITH(status.code() == StatusCode::kUnsupported, status.message());
  EXPECT(Double().call_count("cuFileGetStatsL3") == 0);
  EXPECT(Double().call_count("cuFileSetStatsLevel") == 0);
}

void StatisticsThatCannotBeStartedAreUnknownAndTransfersGoOn() {
  Double().fail("cuFileStatsStart", 1, 5022);
  const Status status = Must(CuFile::Get())->Traffic().status();
  EXPECT_WITH(status.code() == StatusCode::kUnsupported && Contains(status.message(), "5022"), status.message());
  ScratchFile file("no_statistics");
  const auto staging = NewStaging();
  std::byte* const buffer = staging->Take();
  EXPECT(RunOne(*NewEngine(), Request(IoOp::kWrite, file.fd(), buffer)).sys_errno == 0);
  staging->Put(buffer);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return RunWithDoubles(argc, argv,
                        {
                            ISOLATED(WithoutADriverTheReasonNamesIt),
                            ISOLATED(WithoutALibraryTheReasonSaysWhatWasTriedAndWhatToInstall),
                            ISOLATED(TheLibraryIsFoundByItsPath),
                            ISOLATED(TheLibraryOfTheProcessGoesBeforeTheOneOfThePath),
                            ISOLATED(ALibraryThatRefusesToOpenSaysWhyAndIsTriedAgain),
                            ISOLATED(ALibraryThatSomebodyElseHasOpenedIsUsed),
                            ISOLATED(ItIsOpenedOnceForAllEngines),
                            ISOLATED(BuffersOfAStagingAreaAreApartAndComeBack),
                            ISOLATED(WhatIsInNoStagingAreaIsNotFound),
                            ISOLATED(AStagingAreaThatIsRefusedLeavesNothing),
                            ISOLATED(MemoryThatStaysRegisteredIsNotFreed),
                            ISOLATED(TrafficIsCountedByTheWayThatTheLibraryTellsOf<1150>),
                            ISOLATED(TrafficIsCountedByTheWayThatTheLibraryTellsOf<1180>),
                            ISOLATED(TrafficIsCountedByTheWayThatTheLibraryTellsOf<1190>),
                            ISOLATED(TrafficIsCountedByTheWayThatTheLibraryTellsOf<1200>),
                            ISOLATED(StatisticsThatAreNotUnderstoodAreUnknown),
                            ISOLATED(StatisticsOfAVersionWithoutAKnownLayoutAreUnknown<1140>),
                            ISOLATED(StatisticsOfAVersionWithoutAKnownLayoutAreUnknown<1210>),
                            ISOLATED(StatisticsThatCannotBeStartedAreUnknownAndTransfersGoOn),
                        });
}
