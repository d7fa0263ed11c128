// Random problems (problems.h) through the CPU kernel, with every instruction set that the machine
// has and on one or several threads.
//
//   fuzz_cpu [problems [seed [workers]]]
//
// Problem k is drawn from seed + k, so `fuzz_cpu 1 SEED` repeats one alone. Each array lies between
// pages that can't be touched, up against the one or the other; what is left between is checked
// after the call, and so are the operands. Besides what problems.h compares:
//   - instruction sets and numbers of threads all give the same bits;
//   - where time is walked step by step, these are the bits of the written-out loop in the state's
//     type.
// Some calls run with denormal numbers taken for zero, as XLA runs CPU code.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/dtype.h"
#include "core/problem.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "problems.h"

namespace jax_scan::fuzz {
namespace {

constexpr Limits kLimits{
    .largest_bytes = int64_t{16} << 20, .empty = true, .runs = true, .blocks = true};
constexpr size_t kFenced = 512;  // bytes beside an array that are checked

thread_local uint64_t current_seed = 0;
struct sigaction previous_action;

void on_crash(int) {
  char text[80];
  const int length = std::snprintf(text, sizeof(text), "crashed: fuzz_cpu 1 %llu\n",
                                   static_cast<unsigned long long>(current_seed));
  if (write(2, text, length) < 0) _exit(2);
  sigaction(SIGSEGV, &previous_action, nullptr);  // which the same access meets again
}

// Denormal numbers count as zero on this thread, and on those that it starts.
class Flushing {
 public:
#if defined(__SSE2__)
  static constexpr bool kPossible = true;
  explicit Flushing(bool on) : before_(_mm_getcsr()) {
    if (on) _mm_setcsr(before_ | 0x8040);
  }
  ~Flushing() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  static constexpr bool kPossible = false;
  explicit Flushing(bool) {}
#endif
};

// Room for one array between two pages that can't be touched.
class Room {
 public:
  Room() : page_(sysconf(_SC_PAGESIZE)), size_((kLimits.largest_bytes / page_ + 2) * page_) {
    void* const all = mmap(nullptr, size_ + 2 * page_, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    begin_ = static_cast<unsigned char*>(all) + page_;
    if (all == MAP_FAILED || mprotect(begin_, size_, PROT_READ | PROT_WRITE) != 0) std::abort();
  }

  unsigned char* place(size_t bytes, size_t skip, bool at_end) {
    bytes_ = bytes;
    data_ = at_end ? begin_ + size_ - bytes : begin_ + skip;
    low_ = data_ - std::min<size_t>(kFenced, data_ - begin_);
    high_ = data_ + bytes + std::min<size_t>(kFenced, begin_ + size_ - (data_ + bytes));
    std::memset(low_, kPoison, high_ - low_);
    return data_;
  }
  bool intact() const {
    for (const unsigned char* p = low_; p < high_; ++p) {
      if (p == data_) p += bytes_;
      if (p < high_ && *p != kPoison) return false;
    }
    return true;
  }

 private:
  size_t page_, size_;
  unsigned char* begin_;
  unsigned char *data_ = nullptr, *low_ = nullptr, *high_ = nullptr;
  size_t bytes_ = 0;
};

struct Setting {
  cpu::InstructionSet set;
  int64_t threads;

  std::string text() const {
    constexpr const char* kSets[] = {"baseline", "avx2", "avx512"};
    return std::string(kSets[static_cast<int>(set)]) + (threads > 1 ? ", threads" : "");
  }
};

Setting draw_setting(Random& random) {
  constexpr int64_t kThreads[] = {1, 1, 1, 2, 3, 8};
  for (;;) {
    const auto set = static_cast<cpu::InstructionSet>(random.pick(0, 2));
    if (cpu::supported(set)) return {set, kThreads[random.pick(0, 5)]};
  }
}

void run(const Problem& p, Setting setting, bool flush) {
  const Flushing flushing(flush);
  const cpu::Tiling tiling(p, setting.threads);
  std::vector<std::thread> started;
  std::atomic<int64_t> begun{0};
  cpu::parallel_for(
      tiling.count(), setting.threads - 1,
      [&](auto task) { started.emplace_back(std::move(task)); },
      [&](int64_t index) {
        const cpu::Tile tile = tiling.tile(index);
        // A thread takes as long to start as most calls take. Where threads share blocks of time, a
        // call in two waits for the second one.
        ++begun;
        const auto latest = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
        while (tile.handoff && p.time % 2 == 0 && begun < 2) {
          if (std::chrono::steady_clock::now() > latest) break;
          std::this_thread::yield();
        }
        if (!cpu::run_tile(p, tiling.blocks(), tile, setting.set)) std::abort();
      });
  for (std::thread& thread : started) thread.join();
  tiling.finish(p);
}

template <class S>
S get(const Input& in, int64_t o, int64_t t, int64_t i) {
  if (!in.data) return S(0);
  const int64_t k = in.at.outer_offset(o) + in.at.inner_offset(i) + t * in.at.time_stride;
  return visit<S>(in.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T x;
    std::memcpy(&x, static_cast<const T*>(in.data) + k, sizeof(T));
    return load_as<S>(x);
  });
}

template <class S>
void put(const Output& out, int64_t k, S value) {
  if (!out.data) return;
  visit<S>(out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T x = store_as<T>(value);
    std::memcpy(static_cast<T*>(out.data) + k, &x, sizeof(T));
  });
}

// The recurrence as core/problem.h states it. Sums are left out: they have no order.
template <class S>
void written_out(const Problem& p) {
  for (int64_t o = 0; o < p.outer; ++o) {
    for (int64_t i = 0; i < p.inner; ++i) {
      S s = get<S>(p.init, o, 0, i);
      for (int64_t k = 0; k < p.time; ++k) {
        const int64_t t = p.descending() ? p.time - 1 - k : k;
        const int64_t before = p.reverse ? t + 1 : t - 1;
        const bool first = before < 0 || before >= p.time;
        const S h_prev = first ? get<S>(p.h0, o, 0, i) : get<S>(p.h, o, before, i);
        const Broadcast& at = p.reset.at;
        const bool reset =
            p.reset.data &&
            static_cast<const unsigned char*>(
                p.reset.data)[at.outer_offset(o) + at.inner_offset(i) + t * at.time_stride] != 0;
        const bool cut = reset || (first && !p.has_h0);
        const S a = get<S>(p.a, o, t, i), x = get<S>(p.x, o, t, i);
        const int64_t index = (o * p.time + t) * p.inner + i;
        if (p.op == Op::kCotangent) {
          const S u = x + s;
          put(p.y, index, u);
          if (!p.da_over_time && !p.da_over_runs()) put(p.da_out, index, cut ? S(0) : u * h_prev);
          s = cut ? S(0) : a * u;
        } else {
          const S input = p.da.data ? mul_add(get<S>(p.da, o, t, i), h_prev, x) : x;
          s = cut ? x : mul_add(a, s, input);
          put(p.y, index, s);
        }
      }
      put(p.final, o * p.inner + i, s);
    }
  }
}

// Bit for bit, except that one NaN is as good as another.
bool same(const unsigned char* x, const unsigned char* y, int64_t bytes, DType dtype) {
  if (std::memcmp(x, y, bytes) == 0) return true;
  const auto equal = [&](auto tag) {
    using T = decltype(tag);
    for (int64_t k = 0; k < bytes; k += sizeof(T)) {
      T p, q;
      std::memcpy(&p, x + k, sizeof(T));
      std::memcpy(&q, y + k, sizeof(T));
      if (std::memcmp(&p, &q, sizeof(T)) == 0) continue;
      if constexpr (std::is_same_v<T, uint16_t>) {
        const uint16_t infinity = dtype == DType::kF16 ? 0x7c00 : 0x7f80;
        if ((p & 0x7fff) <= infinity || (q & 0x7fff) <= infinity) return false;
      } else {
        if (!std::isnan(p) || !std::isnan(q)) return false;
      }
    }
    return true;
  };
  if (byte_size(dtype) == 2) return equal(uint16_t{});
  return dtype == DType::kF32 || dtype == DType::kC64 ? equal(float{}) : equal(double{});
}

class Worker {
 public:
  // What is wrong; empty: nothing.
  std::string check(const Case& c, Report* report) {
    Random random(c.seed ^ 0xd1b54a32d192ed03u);
    const bool flush = Flushing::kPossible && random.chance(0.25);
    Pointers at{};
    std::vector<unsigned char> operands[kFirstResult];
    for (int k = 0; k < kSlots; ++k) {
      const auto slot = static_cast<Slot>(k);
      if (!c.arrays[k].present) continue;
      const int64_t bytes = c.bytes(slot), skip = c.skipped_bytes(slot);
      const bool at_end = (skip > 0 || bytes % 64 == 0) && random.chance(0.7);
      at[k] = rooms_[k].place(bytes, skip, at_end);
      if (k >= kFirstResult) continue;
      fill(c, slot, at[k]);
      operands[k].assign(at[k], at[k] + bytes);
    }
    const Problem problem = c.problem(at);
    if (problem.da_over_runs() && !cpu::sums_da(problem)) return "";
    std::string failure;
    const auto fail = [&](const std::string& text) {
      if (failure.empty()) failure = text;
    };
    const auto check_around = [&](const Setting& setting) {
      for (int k = 0; k < kSlots; ++k) {
        if (!c.arrays[k].present) continue;
        const char* const slot = name(static_cast<Slot>(k));
        if (!rooms_[k].intact()) {
          fail(std::string("written beside ") + slot + ", " + setting.text());
        }
        if (k < kFirstResult && !std::equal(operands[k].begin(), operands[k].end(), at[k])) {
          fail(std::string("written to operand ") + slot + ", " + setting.text());
        }
      }
      if (report) report->count_call(setting.text());
    };
    const auto clear = [&] {
      for (int k = kFirstResult; k < kSlots; ++k) {
        if (at[k]) std::memset(at[k], kPoison, c.bytes(static_cast<Slot>(k)));
      }
    };
    std::vector<unsigned char> kept[kSlots];
    const auto check_same = [&](const std::string& what, bool sums) {
      for (int k = kFirstResult; k < kSlots; ++k) {
        const bool sum = c.da_over_time || problem.da_over_runs();
        if (!at[k] || (k == kDaOut && sum && !sums)) continue;
        const int bytes = byte_size(c.arrays[k].dtype);
        for (size_t j = 0; j < kept[k].size(); j += bytes) {
          if (same(at[k] + j, &kept[k][j], bytes, c.arrays[k].dtype)) continue;
          fail(std::string(name(static_cast<Slot>(k))) + " has other bits in element " +
               std::to_string(j / bytes) + " " + what + (flush ? ", denormals as zero" : ""));
          break;
        }
      }
    };

    const Setting setting = draw_setting(random);
    run(problem, setting, flush);
    check_around(setting);
    Results results[1];
    results[0].at = at;
    const Compared compared = compare(c, at, results, flush);
    if (!results[0].failure.empty()) {
      fail(results[0].failure + ", " + setting.text() + (flush ? ", denormals as zero" : ""));
    }
    if (report) {
      report->add(results[0]);
      report->compared.elements += compared.elements;
      report->compared.open += compared.open;
    }

    const bool again = random.chance(0.35);
    const bool loop = random.chance(0.35) && cpu::Blocks(problem).plain();
    for (int k = kFirstResult; (again || loop) && k < kSlots; ++k) {
      if (at[k]) kept[k].assign(at[k], at[k] + c.bytes(static_cast<Slot>(k)));
    }
    if (again) {
      const Setting other = draw_setting(random);
      clear();
      run(problem, other, flush);
      check_around(other);
      check_same("with " + setting.text() + " than with " + other.text(), true);
    }
    if (loop) {
      const Flushing flushing(flush);
      switch (c.state) {
        case DType::kF64:
          written_out<double>(problem);
          break;
        case DType::kC64:
          written_out<Complex64>(problem);
          break;
        case DType::kC128:
          written_out<Complex128>(problem);
          break;
        default:
          written_out<float>(problem);
      }
      check_same("with " + setting.text() + " than the written-out loop", false);
    }
    return failure;
  }

 private:
  Room rooms_[kSlots];
};

}  // namespace
}  // namespace jax_scan::fuzz

int main(int argc, char** argv) {
  using namespace jax_scan::fuzz;
  const int64_t problems = argc > 1 ? std::atoll(argv[1]) : 10000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const int workers =
      argc > 3 ? std::atoi(argv[3]) : static_cast<int>(std::thread::hardware_concurrency());
  struct sigaction action{};
  action.sa_handler = on_crash;
  sigaction(SIGSEGV, &action, &previous_action);

  const auto begin = std::chrono::steady_clock::now();
  std::atomic<int64_t> next{0}, failed{0};
  std::mutex mutex;
  Report all;
  const auto work = [&] {
    Worker worker;
    Report report;
    for (int64_t k; failed < 20 && (k = next++) < problems;) {
      current_seed = seed + static_cast<uint64_t>(k);
      const Case c = draw(current_seed, kLimits);
      report.count(c);
      const std::string failure = worker.check(c, &report);
      if (failure.empty()) continue;
      ++report.failures;
      ++failed;
      const Case small =
          shrink(c, [&](const Case& x) { return !worker.check(x, nullptr).empty(); });
      const std::lock_guard lock(mutex);
      std::printf("FAILED: fuzz_cpu 1 %llu\n  %s\n  %s\n  smaller: %s\n  %s\n",
                  static_cast<unsigned long long>(c.seed), failure.c_str(), c.text().c_str(),
                  worker.check(small, nullptr).c_str(), small.text().c_str());
      std::fflush(stdout);
    }
    const std::lock_guard lock(mutex);
    all.merge(report);
  };
  std::vector<std::thread> threads;
  for (int k = 0; k < workers && k < problems; ++k) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%s\n", all.json("cpu", seed, seconds).c_str());
  return all.failures != 0;
}
