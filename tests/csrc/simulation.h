// The common part of simulations: random schedules from a seed, a clock that they advance, and the report of a failing
// seed. A simulation drives a core of the product in one thread, so a seed means the same events in the same order
// everywhere:
//
//     build/programs-plain/request_simulation_test --schedules 1 --seed 4711
//
// Without --seed it begins with 1; without --schedules it does as many as take some seconds.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "testing.h"
#include "transfer/clock.h"

namespace fastpersist {

// SplitMix64: good enough here, and quick to seed, unlike std::mt19937_64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15U) {}

  uint64_t Next() {
    uint64_t word = state_ += 0x9E3779B97F4A7C15U;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9U;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBU;
    return word ^ (word >> 31);
  }
  uint64_t Below(uint64_t end) { return Next() % end; }
  uint64_t Within(uint64_t low, uint64_t high) { return low + Below(high - low + 1); }
  bool OneIn(uint64_t count) { return Below(count) == 0; }

 private:
  uint64_t state_;
};

class SimulatedClock : public TransferClock {
 public:
  TimePoint Now() const override { return now_; }
  void Sleep(std::chrono::nanoseconds duration) override { now_ += duration; }

 private:
  TimePoint now_ = TimePoint() + std::chrono::hours(1);
};

inline uint64_t g_seed = 0;               // of the schedule that runs
inline const char* g_program_name = "?";  // for the line that says how to run it again

inline void TellSeed() {
  std::printf("seed %llu; again: %s --schedules 1 --seed %llu\n", static_cast<unsigned long long>(g_seed),
              g_program_name, static_cast<unsigned long long>(g_seed));
  std::fflush(stdout);
}

// An invariant of a schedule. The first broken one ends the program, since all that follows is meaningless.
#define ALWAYS(condition, detail)                                                        \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      ::fastpersist::Expect(false, #condition, std::string(detail), __FILE__, __LINE__); \
      ::fastpersist::TellSeed();                                                         \
      std::_Exit(1);                                                                     \
    }                                                                                    \
  } while (false)

// Runs `schedule(seed)` as often as the command line says, or default_count times; returns the exit status.
inline int RunSchedules(int argc, char** argv, uint64_t default_count, void (*schedule)(uint64_t seed)) {
  g_test = g_program_name = argv[0];
  uint64_t first_seed = 1;
  uint64_t count = default_count;
  for (int i = 1; i < argc; ++i) {
    const bool is_last = i + 1 == argc;
    if (std::strcmp(argv[i], "--seed") == 0 && !is_last) first_seed = std::strtoull(argv[++i], nullptr, 10);
    if (std::strcmp(argv[i], "--schedules") == 0 && !is_last) count = std::strtoull(argv[++i], nullptr, 10);
  }
  // A failing check of the product (FP_CHECK) also ends the process.
  signal(SIGABRT, [](int) { TellSeed(); });
  for (uint64_t i = 0; i < count; ++i) {
    g_seed = first_seed + i;
    schedule(g_seed);
  }
  std::printf("%llu schedules, seeds from %llu\n", static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(first_seed));
  return 0;
}

}  // namespace fastpersist
