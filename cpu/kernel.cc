#include "cpu/kernel.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "core/dtype.h"
#include "core/problem.h"
#include "cpu/walks.h"

namespace jax_scan::cpu {

bool supported(InstructionSet set) {
  switch (set) {
    case InstructionSet::kBaseline:
      return true;
#if defined(__x86_64__)
    case InstructionSet::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
             __builtin_cpu_supports("fma");
    case InstructionSet::kAvx512:
      return supported(InstructionSet::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
#endif
    default:
      return false;
  }
}

InstructionSet best_instruction_set() {
  static const InstructionSet best = [] {
    for (const InstructionSet set : {InstructionSet::kAvx512, InstructionSet::kAvx2}) {
      if (supported(set)) return set;
    }
    return InstructionSet::kBaseline;
  }();
  return best;
}

// From so much time on it is cut into chunks where neighbouring channels are fewer than kFewest. So
// it is where they are an odd number and of fewer than kFewGroups outer indices, in a call of
// several threads: step by step they are walked in half of the time or less, but chunks are work
// for all.
constexpr int64_t kChunkedTime = 256, kFewest = 4, kFewGroups = 4;
// With fewer neighbouring channels, ones of several outer indices share a tile in short times.
constexpr int64_t kShortRow = 8;

static bool has_rows(const Problem& p) {
  return p.inner >= kShortRow || (p.inner >= kFewest && p.time >= kChunkedTime);
}
constexpr int64_t kWide = 1024;    // channels of a tile at most, where there are rows
constexpr int64_t kFarApart = 64;  // and where there are none
// Where time is the last axis, so many channels do without chunks: eight tiles, each twice as fast.
constexpr int64_t kManyLines = 128;
// Channels that fill no more than four of the widest vectors, which hold all that a step of
// so many needs: time is cut into blocks, of which the second-level cache holds all operands.
constexpr int64_t kFewBytes = 256, kBlockBytes = 65536;
// Where da is summed over outer indices: sums that stay in the second-level cache beside the rows
// of an `a` that these indices share, and the least that is worth a turn, for which a state is
// kept.
constexpr int64_t kTurnBytes = 131072, kTurnElements = 1024, kTurnSteps = 16;

Blocks::Blocks(const Problem& p) {
  const int64_t size = byte_size(p.state);
  // Chunks of time as lanes, two vectors or more, in blocks that stay in the first-level cache.
  const bool whole_lines = p.inner * size % 64 == 0, odd = p.inner < 64 && !whole_lines;
  const bool threads = p.channels() * p.time >= kSerialElements;
  const bool few = p.inner < kFewest || (odd && p.outer < kFewGroups && threads);
  const bool lines = p.inner == 1 && p.outer >= kManyLines;
  if (p.channels() > 0 && few && p.time >= kChunkedTime && !lines) {
    chunks_ = p.inner == 1 ? 32 : 16;
    steps_ = std::max<int64_t>(16, 8192 / size / (chunks_ * p.inner) / 16 * 16);
  } else if (whole_lines && p.channels() * size <= kFewBytes &&
             p.channels() * p.time >= kSerialElements / 2) {
    steps_ = std::max<int64_t>(64, kBlockBytes / size / p.channels() / 64 * 64);
  } else if (p.da_outer_run > 1 && has_rows(p) && p.time >= kTurnSteps &&
             p.inner * p.time >= kTurnElements) {
    steps_ = std::max<int64_t>(8, kTurnBytes / size / std::min(p.inner, kWide) / 8 * 8);
    in_turns_ = true;
  }
  int64_t t = 0;
  if (cut()) {
    full_ = p.time / (chunks_ * steps_);
    t = full_ * chunks_ * steps_;
  }
  // The rest: blocks of shorter chunks, and at last some single steps.
  while (t < p.time || rest_count_ + full_ == 0) {
    Block& block = rest_[rest_count_++];
    block = {t, chunks_, (p.time - t) / chunks_};
    if (block.chunks > 16 && block.steps * p.inner < 16) block = {t, 16, (p.time - t) / 16};
    if (block.chunks > 1 && block.steps * p.inner < 16) block = {t, 1, p.time - t};
    t = block.end();
  }
}

// Channels of a run that are summed at a time, by one tile: as many whatever the number of threads,
// for the order of a sum decides its bits; if possible whole lines of memory, for tiles are so many
// times wide. 1: a run has no such parts.
constexpr int64_t kMostSummed = 256, kLeastSummed = 16;

static int64_t part_of_run(int64_t run) {
  for (const int64_t unit : {32, 16, 1}) {
    const int64_t largest = std::min(run, kMostSummed) / unit * unit;
    for (int64_t part = largest; part >= kLeastSummed; part -= unit) {
      if (run % part == 0) return part;
    }
  }
  return 1;
}

bool sums_da(const Problem& p) {
  if (p.op != Op::kCotangent) return false;
  const Blocks blocks(p);
  if (p.da_outer_run > 1) return p.da_inner_run == 1 && blocks.in_turns();
  return part_of_run(p.da_inner_run) > 1 && (!blocks.cut() || blocks[0].chunks == 1);
}

Block Blocks::operator[](int64_t index) const {
  if (index < full_) return {index * chunks_ * steps_, chunks_, steps_};
  return rest_[index - full_];
}

Tiling::Tiling(const Problem& p, int64_t threads) : blocks_(p) {
  if (p.da_out.data && p.da_inner_run > 1) {
    part_ = part_of_run(p.da_inner_run);
    sums_ = p.da_out;
    if (part_ < p.da_inner_run) {
      const int64_t parts = p.channels() / part_ * p.time;
      sums_of_parts_.reset(new (std::nothrow) std::byte[parts * byte_size(p.state)]);
      sums_ = {sums_of_parts_.get(), p.state};
    }
  }
  if (!blocks_.plain()) {
    inner_ = width_ = p.inner;
    groups_ = p.inner > 0 ? p.outer : 0;
    per_group_ = 1;
    count_ = groups_;
    if (threads > 1 && groups_ < 4 * threads) share(p, std::min(threads, blocks_.count()));
    return;
  }
  const bool rows = has_rows(p);
  inner_ = rows ? p.inner : p.channels();
  width_ = std::min(inner_, rows ? kWide : kFarApart) / part_ * part_;
  if (blocks_.in_turns()) outers_ = p.da_outer_run;
  groups_ = inner_ > 0 ? p.channels() / inner_ / outers_ : 0;
  const auto count = [&] { return inner_ > 0 ? groups_ * ((inner_ + width_ - 1) / width_) : 0; };
  // Whole rows where that gives every thread something to do.
  constexpr int64_t kNarrow = 256, kLeastFarApart = 16;
  const int64_t least = rows ? kNarrow : kLeastFarApart;
  while (outers_ == 1 && width_ >= 2 * least && count() < 2 * threads) {
    width_ = width_ / 2 / part_ * part_;
  }
  count_ = count();
  per_group_ = groups_ > 0 ? count_ / groups_ : 0;
  if (outers_ > 1) share(p, count_ < 2 * threads ? std::min(threads, blocks_.count()) : 1);
}

// `sharers`: tiles of the same channels.
void Tiling::share(const Problem& p, int64_t sharers) {
  const int64_t groups = count_, handoffs = groups * outers_;
  const int64_t lines = (width_ * byte_size(p.state) + 63) / 64;
  const int64_t each = blocks_.in_turns() ? 1 : 2;  // with sums over time
  values_.reset(new (std::nothrow) CacheLine[each * handoffs * lines]());
  handoffs_.reset(new (std::nothrow) Handoff[handoffs]);
  claims_.reset(new (std::nothrow) Claims[groups]);
  shared_ = true;
  for (int64_t k = 0; ready() && k < handoffs; ++k) {
    CacheLine* const values = &values_[each * k * lines];
    handoffs_[k].set(&claims_[k / outers_], values, each > 1 ? values + lines : nullptr);
  }
  sharers_ = sharers;
  count_ = groups * sharers;
}

Tile Tiling::tile(int64_t index) const {
  const int64_t group = index % (count_ / sharers_);
  const int64_t first = group % per_group_ * width_;
  return {.channel = group / per_group_ * outers_ * inner_ + first,
          .width = std::min(width_, inner_ - first),
          .outers = outers_,
          .claims = claims_ ? &claims_[group] : nullptr,
          .handoff = handoffs_ ? &handoffs_[group * outers_] : nullptr,
          .sharers = sharers_,
          .part = part_,
          .sums = sums_};
}

template <class S>
static void sum_parts(const S* from, int64_t parts, const Output& to, int64_t count) {
  visit<S>(to.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t k = 0; k < count; ++k, from += parts) {
      S sum = from[0];
      for (int64_t j = 1; j < parts; ++j) sum = sum + from[j];
      static_cast<T*>(to.data)[k] = store_as<T>(sum);
    }
  });
}

void Tiling::finish(const Problem& p) const {
  if (!sums_of_parts_) return;
  const int64_t parts = p.da_inner_run / part_, count = p.channels() / p.da_inner_run * p.time;
  const auto sum = [&](auto tag) {
    using S = decltype(tag);
    sum_parts(reinterpret_cast<const S*>(sums_of_parts_.get()), parts, p.da_out, count);
  };
  switch (p.state) {
    case DType::kF64:
      return sum(double{});
    case DType::kC64:
      return sum(Complex64{});
    case DType::kC128:
      return sum(Complex128{});
    default:
      return sum(float{});
  }
}

bool run_tile(const Problem& problem, const Blocks& blocks, const Tile& tile, InstructionSet set) {
  switch (set) {
#if defined(__x86_64__)
    case InstructionSet::kAvx2:
      return run_avx2(problem, blocks, tile);
    case InstructionSet::kAvx512:
      return run_avx512(problem, blocks, tile);
#endif
    default:
      return run_baseline(problem, blocks, tile);
  }
}

}  // namespace jax_scan::cpu
