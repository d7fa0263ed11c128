// Random problems (problems.h) through the CUDA kernels, on each path that serves them.
//
//   fuzz_cuda [problems [seed [workers]]] [--path NAME] [--largest BYTES] [--separate]
//
// Problem k is drawn from seed + k, so `fuzz_cuda 1 SEED` repeats one alone. Workers launch on
// streams of their own, each with the problems of a batch, one after the other, in one piece of
// memory. Everything in it but the results is checked to be unchanged after the batch. A path that
// runs twice must give the same bits. The workspace holds what the last call has left there, or
// any byte.
//
// --separate, for compute-sanitizer: each array and workspace is an allocation of its own, to the
// byte, and nothing is written to results and workspaces before the kernel does.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/launch.h"
#include "problems.h"

namespace jax_scan::fuzz {
namespace {

constexpr size_t kArenaBytes = size_t{96} << 20, kBatchBytes = size_t{8} << 20;
constexpr size_t kWorkspaceBytes = size_t{128} << 20;
constexpr size_t kGuard = 64;  // bytes beside an array, at least
constexpr int kBatch = 64;     // problems
constexpr int64_t kManyElements = 100000;

struct NamedPath {
  Path path;
  const char* name;
};
constexpr NamedPath kPaths[] = {{Path::kAuto, "auto"},       {Path::kCluster, "cluster"},
                                {Path::kBoxed, "boxed"},     {Path::kSequential, "sequential"},
                                {Path::kLined, "lined"},     {Path::kPiped, "piped"},
                                {Path::kChained, "chained"}, {Path::kGeneral, "general"},
                                {Path::kWalked, "walked"},   {Path::kResident, "resident"}};
constexpr int kPathCount = sizeof(kPaths) / sizeof(kPaths[0]);

void demand(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::fflush(stdout);
  std::_Exit(3);
}

template <class T>
struct Freed {
  void operator()(T* p) const { cudaFree(p); }
};
struct FreedHost {
  void operator()(unsigned char* p) const { cudaFreeHost(p); }
};
using DeviceMemory = std::unique_ptr<unsigned char, Freed<unsigned char>>;
using HostMemory = std::unique_ptr<unsigned char, FreedHost>;

DeviceMemory device_memory(size_t bytes) {
  void* p = nullptr;
  demand(cudaMalloc(&p, std::max<size_t>(bytes, 1)), "cudaMalloc");
  return DeviceMemory(static_cast<unsigned char*>(p));
}
HostMemory host_memory(size_t bytes) {
  void* p = nullptr;
  demand(cudaHostAlloc(&p, bytes, cudaHostAllocDefault), "cudaHostAlloc");
  return HostMemory(static_cast<unsigned char*>(p));
}

struct Settings {
  int path = -1;  // the only one
  bool separate = false;
  Limits limits{.largest_bytes = int64_t{8} << 20, .sums = true};
};

// One path's run of one problem.
struct Call {
  int path = 0;
  size_t offsets[kSlots] = {};  // of the results, in the arena
  bool served = false;
};

struct Planned {
  Case c;
  size_t offsets[kFirstResult] = {};
  std::vector<Call> calls;
  int again = -1;  // the call that the last one repeats
};

class Worker {
 public:
  explicit Worker(const Settings& settings)
      : settings_(settings),
        before_(host_memory(kArenaBytes)),
        after_(host_memory(kArenaBytes)),
        guard_(host_memory(kGuard)),
        arena_(device_memory(settings.separate ? 1 : kArenaBytes)),
        workspace_(device_memory(settings.separate ? 1 : kWorkspaceBytes + kGuard)) {
    demand(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    if (settings.separate) return;
    demand(cudaMemset(workspace_.get() + kWorkspaceBytes, kPoison, kGuard), "cudaMemset");
  }
  ~Worker() { cudaStreamDestroy(stream_); }

  // What is wrong with each; empty: nothing.
  std::vector<std::string> check(const std::vector<Case>& cases, Report* report) {
    std::vector<std::string> failures;
    for (size_t done = 0; done < cases.size();) {
      std::vector<Planned> batch;
      used_ = kGuard;
      while (done < cases.size() && (batch.empty() || used_ < kBatchBytes)) {
        batch.push_back(plan(cases[done++]));
      }
      if (used_ > kArenaBytes) {
        std::printf("%s needs %zu bytes\n", batch.back().c.text().c_str(), used_);
        std::_Exit(3);
      }
      std::memset(before_.get(), kPoison, used_);
      for (const Planned& p : batch) {
        for (int slot = 0; slot < kFirstResult; ++slot) {
          fill(p.c, static_cast<Slot>(slot), before_.get() + p.offsets[slot]);
        }
      }
      if (settings_.separate) {
        std::memcpy(after_.get(), before_.get(), used_);
        for (Planned& p : batch) run_separately(p);
      } else {
        run_together(batch);
      }
      for (Planned& p : batch) failures.push_back(examine(p, report));
      check_rest(batch, failures);
    }
    return failures;
  }

 private:
  size_t reserve(const Case& c, Slot slot) {
    if (!c.arrays[slot].present) return 0;
    const size_t offset = (used_ + 255) / 256 * 256 + c.skipped_bytes(slot);
    used_ = offset + c.bytes(slot) + kGuard;
    return offset;
  }

  Planned plan(const Case& c) {
    Planned p;
    p.c = c;
    Random random(c.seed ^ 0xd1b54a32d192ed03u);
    for (int slot = 0; slot < kFirstResult; ++slot) {
      p.offsets[slot] = reserve(c, static_cast<Slot>(slot));
    }
    const int one = static_cast<int>(random.pick(1, kPathCount - 1));
    for (int path = 0; path < kPathCount; ++path) {
      const bool wanted = c.elements() <= kManyElements || path == 0 || path == one;
      if (settings_.path < 0 ? wanted : path == settings_.path) p.calls.push_back({path});
    }
    if (random.chance(0.3)) {
      p.again = static_cast<int>(random.pick(0, static_cast<int64_t>(p.calls.size()) - 1));
      p.calls.push_back({p.calls[p.again].path});
    }
    for (Call& call : p.calls) {
      for (int slot = kFirstResult; slot < kSlots; ++slot) {
        call.offsets[slot] = reserve(c, static_cast<Slot>(slot));
      }
    }
    return p;
  }

  static size_t workspace_of(const Case& c) { return workspace_bytes(c.problem({})); }

  void call(const Planned& p, Call& call, const Pointers& at, unsigned char* workspace) {
    const cudaError_t error = launch(p.c.problem(at), workspace, stream_, kPaths[call.path].path);
    call.served = error == cudaSuccess;
    if (error != cudaErrorNotSupported) {
      demand(error, (std::string(kPaths[call.path].name) + ", fuzz_cuda 1 " +
                     std::to_string(p.c.seed) + ", " + p.c.text())
                        .c_str());
    }
  }

  void wait(const std::string& what) {
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
      const cudaError_t error = cudaStreamQuery(stream_);
      if (error == cudaSuccess) return;
      if (error != cudaErrorNotReady) demand(error, what.c_str());
      const auto waited = std::chrono::steady_clock::now() - begin;
      if (waited > std::chrono::minutes(settings_.separate ? 5 : 1)) {
        std::printf("HANGS: %s\n", what.c_str());
        std::fflush(stdout);
        std::_Exit(4);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  void run_together(std::vector<Planned>& batch) {
    demand(cudaMemcpyAsync(arena_.get(), before_.get(), used_, cudaMemcpyHostToDevice, stream_),
           "cudaMemcpyAsync");
    for (Planned& p : batch) {
      Random random(p.c.seed ^ 0x2545f4914f6cdd1du);
      const size_t bytes = workspace_of(p.c);
      if (bytes > kWorkspaceBytes) {
        std::printf("%s: a workspace of %zu bytes\n", p.c.text().c_str(), bytes);
        std::_Exit(3);
      }
      // It ends at the guard, as nearly as its alignment allows.
      unsigned char* const workspace = workspace_.get() + (kWorkspaceBytes - bytes) / 256 * 256;
      for (Call& one : p.calls) {
        if (random.chance(0.3)) {
          demand(cudaMemsetAsync(workspace, static_cast<int>(random.pick(0, 255)), bytes, stream_),
                 "cudaMemsetAsync");
        }
        Pointers at{};
        for (int slot = 0; slot < kSlots; ++slot) {
          const size_t offset = slot < kFirstResult ? p.offsets[slot] : one.offsets[slot];
          if (offset) at[slot] = arena_.get() + offset;
        }
        call(p, one, at, workspace);
      }
    }
    demand(cudaMemcpyAsync(after_.get(), arena_.get(), used_, cudaMemcpyDeviceToHost, stream_),
           "cudaMemcpyAsync");
    demand(cudaMemcpyAsync(guard_.get(), workspace_.get() + kWorkspaceBytes, kGuard,
                           cudaMemcpyDeviceToHost, stream_),
           "cudaMemcpyAsync");
    wait("fuzz_cuda " + std::to_string(batch.size()) + " " + std::to_string(batch[0].c.seed));
  }

  void run_separately(Planned& p) {
    for (Call& one : p.calls) {
      Pointers at{};
      std::vector<DeviceMemory> memory;
      const auto offset = [&](int slot) {
        return slot < kFirstResult ? p.offsets[slot] : one.offsets[slot];
      };
      for (int k = 0; k < kSlots; ++k) {
        const auto slot = static_cast<Slot>(k);
        if (!offset(k)) continue;
        memory.push_back(device_memory(p.c.bytes(slot) + p.c.skipped_bytes(slot)));
        at[k] = memory.back().get() + p.c.skipped_bytes(slot);
        if (k >= kFirstResult) continue;
        demand(cudaMemcpyAsync(at[k], before_.get() + offset(k), p.c.bytes(slot),
                               cudaMemcpyHostToDevice, stream_),
               "cudaMemcpyAsync");
      }
      memory.push_back(device_memory(workspace_of(p.c)));
      call(p, one, at, memory.back().get());
      for (int k = 0; k < kSlots; ++k) {
        if (!at[k] || (k >= kFirstResult && !one.served)) continue;
        demand(cudaMemcpyAsync(after_.get() + offset(k), at[k], p.c.bytes(static_cast<Slot>(k)),
                               cudaMemcpyDeviceToHost, stream_),
               "cudaMemcpyAsync");
      }
      wait(std::string(kPaths[one.path].name) + ", fuzz_cuda 1 " + std::to_string(p.c.seed) + ", " +
           p.c.text());
    }
  }

  // Compares the results, and puts the poison back where they were.
  std::string examine(Planned& p, Report* report) {
    Pointers operands{};
    for (int slot = 0; slot < kFirstResult; ++slot) {
      if (p.offsets[slot]) operands[slot] = before_.get() + p.offsets[slot];
    }
    std::vector<Results> results;
    std::vector<const Call*> of;
    for (const Call& one : p.calls) {
      if (!one.served) continue;
      results.emplace_back();
      of.push_back(&one);
      for (int slot = kFirstResult; slot < kSlots; ++slot) {
        if (one.offsets[slot]) results.back().at[slot] = after_.get() + one.offsets[slot];
      }
      if (report) report->count_call(kPaths[one.path].name);
    }
    if (results.empty()) return {};
    const Compared compared = compare(p.c, operands, results);
    std::string failure;
    for (size_t k = 0; k < results.size(); ++k) {
      if (!results[k].failure.empty() && failure.empty()) {
        failure = results[k].failure + ", " + kPaths[of[k]->path].name;
      }
      if (report) report->add(results[k]);
    }
    if (report) {
      report->compared.elements += compared.elements * static_cast<int64_t>(results.size());
      report->compared.open += compared.open * static_cast<int64_t>(results.size());
    }
    for (int k = kFirstResult; k < kSlots; ++k) {
      const auto slot = static_cast<Slot>(k);
      if (!p.c.arrays[k].present) continue;
      const auto bits = [&](const Call& one) { return after_.get() + one.offsets[k]; };
      if (p.again >= 0 && p.calls.back().served && failure.empty() &&
          std::memcmp(bits(p.calls[p.again]), bits(p.calls.back()), p.c.bytes(slot)) != 0) {
        failure = std::string(name(slot)) + " has other bits when run again, " +
                  kPaths[p.calls.back().path].name;
      }
      for (const Call& one : p.calls) {
        if (one.served) std::memset(bits(one), kPoison, p.c.bytes(slot));
      }
    }
    return failure;
  }

  // All but the results must be as it was.
  void check_rest(const std::vector<Planned>& batch, std::vector<std::string>& failures) {
    const bool guarded =
        settings_.separate || std::all_of(guard_.get(), guard_.get() + kGuard,
                                          [](unsigned char byte) { return byte == kPoison; });
    if (!guarded) {
      demand(cudaMemset(workspace_.get() + kWorkspaceBytes, kPoison, kGuard), "cudaMemset");
    }
    if (guarded && std::memcmp(before_.get(), after_.get(), used_) == 0) return;
    const size_t first = failures.size() - batch.size();
    size_t end = kGuard;
    for (size_t k = 0; k < batch.size(); ++k) {
      const size_t begin = end;
      for (int slot = 0; slot < kSlots; ++slot) {
        const auto reach = [&](size_t offset) {
          const auto bytes = static_cast<size_t>(batch[k].c.bytes(static_cast<Slot>(slot)));
          if (offset) end = std::max(end, offset + bytes + kGuard);
        };
        if (slot < kFirstResult) reach(batch[k].offsets[slot]);
        for (const Call& one : batch[k].calls) {
          if (slot >= kFirstResult) reach(one.offsets[slot]);
        }
      }
      const auto place =
          std::mismatch(before_.get() + begin, before_.get() + end, after_.get() + begin);
      const auto at = static_cast<size_t>(place.first - before_.get());
      if (!guarded && failures[first + k].empty()) {
        failures[first + k] = "written behind a workspace, in this batch";
      } else if (at < end && failures[first + k].empty()) {
        failures[first + k] = "written where no result is, at " + describe(batch[k], at);
      }
    }
  }

  static std::string describe(const Planned& p, size_t at) {
    std::string text;
    const auto add = [&](const std::string& array, size_t offset) {
      if (!offset || at + kGuard < offset) return;
      text = array + " + " + std::to_string(static_cast<int64_t>(at - offset));
    };
    for (int k = 0; k < kFirstResult; ++k) add(name(static_cast<Slot>(k)), p.offsets[k]);
    for (const Call& one : p.calls) {
      for (int k = kFirstResult; k < kSlots; ++k) {
        add(std::string(name(static_cast<Slot>(k))) + " of " + kPaths[one.path].name,
            one.offsets[k]);
      }
    }
    return text;
  }

  const Settings& settings_;
  HostMemory before_, after_, guard_;  // the arena's bytes before and after the calls
  DeviceMemory arena_, workspace_;
  cudaStream_t stream_ = nullptr;
  size_t used_ = 0;
};

}  // namespace
}  // namespace jax_scan::fuzz

int main(int argc, char** argv) {
  using namespace jax_scan::fuzz;
  Settings settings;
  std::vector<const char*> numbers;
  for (int k = 1; k < argc; ++k) {
    const std::string argument = argv[k];
    if (argument == "--separate") {
      settings.separate = true;
    } else if (argument == "--largest" && k + 1 < argc) {
      settings.limits.largest_bytes = std::atoll(argv[++k]);
    } else if (argument == "--path" && k + 1 < argc) {
      settings.limits.waves = std::string(argv[k + 1]) == "resident";
      for (int path = 0; path < kPathCount; ++path) {
        if (std::string(argv[k + 1]) == kPaths[path].name) settings.path = path;
      }
      ++k;
    } else {
      numbers.push_back(argv[k]);
    }
  }
  const int64_t problems = numbers.size() > 0 ? std::atoll(numbers[0]) : 10000;
  const uint64_t seed = numbers.size() > 1 ? std::strtoull(numbers[1], nullptr, 10) : 1;
  const int workers = numbers.size() > 2 ? std::atoi(numbers[2])
                                         : static_cast<int>(std::thread::hardware_concurrency());

  const auto begin = std::chrono::steady_clock::now();
  std::atomic<int64_t> next{0}, failed{0};
  std::mutex mutex;
  Report all;
  const auto work = [&] {
    Worker worker(settings);
    Report report;
    const int64_t batch = std::clamp<int64_t>(problems / workers, 1, kBatch);
    for (int64_t k; failed < 20 && (k = next.fetch_add(batch)) < problems;) {
      std::vector<Case> cases;
      for (; cases.size() < static_cast<size_t>(batch) && k < problems; ++k) {
        cases.push_back(draw(seed + static_cast<uint64_t>(k), settings.limits));
        report.count(cases.back());
      }
      const std::vector<std::string> failures = worker.check(cases, &report);
      for (size_t j = 0; j < cases.size(); ++j) {
        if (failures[j].empty()) continue;
        ++report.failures;
        if (++failed > 20) break;
        const auto fails = [&](const Case& x) { return !worker.check({x}, nullptr)[0].empty(); };
        const Case small = fails(cases[j]) ? shrink(cases[j], fails) : cases[j];
        const std::lock_guard lock(mutex);
        std::printf("FAILED: fuzz_cuda 1 %llu\n  %s\n  %s\n  smaller: %s\n  %s\n",
                    static_cast<unsigned long long>(cases[j].seed), failures[j].c_str(),
                    cases[j].text().c_str(), worker.check({small}, nullptr)[0].c_str(),
                    small.text().c_str());
        std::fflush(stdout);
      }
    }
    const std::lock_guard lock(mutex);
    all.merge(report);
  };
  std::vector<std::thread> threads;
  for (int k = 0; k < workers && k < problems; ++k) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%s\n", all.json("cuda", seed, seconds).c_str());
  return all.failures != 0;
}
