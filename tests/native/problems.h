// Random calls of a kernel, and what must come out of them: shared by the drivers fuzz_cpu.cc and
// fuzz_cuda.cc. Everything follows from a 64-bit seed.
//
// What is expected is the recurrence as core/problem.h states it, one channel at a time, in
// float64 or complex128 for states of 32 bits and in long double for those of 64. Every element of
// every result is compared:
//   - a NaN or infinity must be there exactly where the recurrence in the state's type has one;
//   - a finite element must lie between the roundings of (expected - bound) and (expected + bound).
//     The bound follows the recurrence too: each step adds a rounding of the largest number that
//     went into it, and carries earlier errors on multiplied by |a|. Roundings are independent, so
//     their squares are added, unless a, x or da h is the same in each step. What is lost where a
//     number or a product of factors underflows is added.
//   - where a sum or product comes so near to the largest number that it depends on the order of
//     operations whether it overflows, everything is allowed in this channel up to the next cut.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/problem.h"

namespace jax_scan::fuzz {

// A counter through a mixer (splitmix64): any seed is as good as another, also the next one.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  double unit();                            // in [0, 1)
  int64_t pick(int64_t low, int64_t high);  // both ends included
  bool chance(double p) { return unit() < p; }

 private:
  uint64_t state_;
};

// The operands and results of a Problem, in the order of its members.
enum Slot { kA, kX, kDa, kH, kH0, kInit, kReset, kY, kDaOut, kFinal, kSlots };
inline constexpr int kFirstResult = kY;
const char* name(Slot slot);

using Pointers = std::array<unsigned char*, kSlots>;

enum class Values : uint8_t {
  kPlain,    // in [-1, 1]
  kGrowing,  // |a| up to 1.5
  kFinite,   // some are 0, -0, denormal, the largest, 1e30 or 1e-30
  kSpecial,  // and some are infinite or NaN
  kMixed,    // magnitudes 1e30, 1 and 1e-30
  kSmall,    // near the smallest normal number
  kZeros,    // most of them 0, others tiny: a product of factors may overflow where no state does
};
inline constexpr int kValuesCount = 7;
const char* name(Values values);

struct Array {
  bool present = false;
  DType dtype = DType::kF32;
  uint32_t broadcast = 0;  // bit k: this array has no axis k (a result: it is summed over that) ...
  uint32_t repeated = 0;   // ... but `copies` equal entries there, as XLA's partitioner leaves
  int copies = 2;
  int skip = 0;  // elements by which the base misses alignment
};

// All the choices that make a call.
struct Case {
  uint64_t seed = 0;
  Op op = Op::kScan;
  DType state = DType::kF32;
  bool reverse = false, has_h0 = false, da_over_time = false;
  std::vector<int64_t> sizes;  // of all axes
  size_t axis = 0;             // which is time
  Values values = Values::kPlain;
  int factors = 0;     // how `a` is distributed
  double density = 0;  // of special values
  double cuts = 0;     // density of resets
  std::array<Array, kSlots> arrays;

  int64_t outer() const;
  int64_t time() const { return sizes[axis]; }
  int64_t inner() const;
  int64_t elements() const { return outer() * time() * inner(); }
  // The neighbouring indices over which da is summed.
  int64_t inner_run() const;
  int64_t outer_run() const;

  int64_t bytes(Slot slot) const;  // 0: absent
  int64_t skipped_bytes(Slot slot) const;
  // What the kernel is given, when the arrays lie there.
  Problem problem(const Pointers& at) const;
  std::string text() const;

 private:
  int64_t run(size_t begin, size_t end) const;  // of the axes from `begin` to `end`
};

struct Limits {
  int64_t largest_bytes = int64_t{16} << 20;  // of an array in the state's type
  bool empty = false;                         // calls without elements are allowed
  bool sums = false;                          // and sums of da over other axes than time
  bool runs = false;                          // or over runs of neighbouring channels
  bool blocks = false;                        // and few channels with much time more often
  bool waves = false;                         // half of them as cuda/resident.cuh takes them
};
Case draw(uint64_t seed, const Limits& limits);

// The byte around arrays and, before the call, in results: all ones is a NaN of every type.
inline constexpr unsigned char kPoison = 0xff;

// Writes an operand. What no kernel may read keeps its bytes.
void fill(const Case& c, Slot slot, unsigned char* to);

// One call's results, and how near they came to their bounds.
struct Results {
  Pointers at{};
  std::string failure;            // the first wrong element; empty: there is none
  std::array<double, 6> error{};  // the largest, by type, relative to what went into the element
  double of_bound = 0;            // the largest error as a part of what was allowed
};

struct Compared {
  int64_t elements = 0;
  int64_t open = 0;  // of them, those where everything is allowed
};

// Compares the results of several calls of the same case. `flushed`: denormal numbers may count as
// zero.
Compared compare(const Case& c, const Pointers& operands, std::span<Results> results,
                 bool flushed = false);

// The smallest case that still fails, as far as small changes lead to one.
Case shrink(Case c, const std::function<bool(const Case&)>& fails);

// What has been done, one per thread; printed as one line of JSON.
struct Report {
  int64_t problems = 0;
  int64_t failures = 0;
  Compared compared;
  std::array<int64_t, 3> ops{};
  std::array<int64_t, kValuesCount> values{};
  std::array<int64_t, 6> states{};
  std::array<int64_t, 6> types{};  // of `a`
  std::array<double, 6> error{};
  double of_bound = 0;
  std::vector<std::pair<std::string, int64_t>> calls;  // by path or instruction set

  void count(const Case& c);
  void count_call(const std::string& label);
  void add(const Results& results);
  void merge(const Report& other);
  std::string json(const std::string& platform, uint64_t seed, double seconds) const;
};

}  // namespace jax_scan::fuzz
