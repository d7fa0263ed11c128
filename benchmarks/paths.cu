// Times each of the paths in cuda/launch.cc that serves a problem, as it would run it, beside the
// one that is chosen and beside what moves the same bytes: what the rules of cuda/plan.h and
// cuda/launch.cc are made from. With the kernels of a CMake build:
//
//   nvcc -std=c++20 -O2 -arch=native -I. benchmarks/paths.cu
//        BUILD/CMakeFiles/jax_scan_cuda_kernels.dir/cuda/*.o -o paths
//   echo "f32 32 4096 256 plain" | ./paths
//
// A problem is a line: type (f32, bf16, f16, f64, c64, or mix: a in f32, b in bf16), batch, time,
// channels, and plain, reset, or the shape of a: D, LD or BL1. Rows give the fraction of the limit.
// Calls lie in a CUDA graph, on three sets of arrays by turns so that the L2 cache has none of them
// unless they are small; medians.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "cuda/launch.cc"

namespace jax_scan {
namespace {

constexpr int kSets = 3;
constexpr size_t kArena = size_t{9} << 30, kWorkspace = size_t{512} << 20;
const char* const kNames[] = {"boxed", "walked", "resident", "cluster", "sequential",
                              "lined", "piped",  "chained",  "general"};
static_assert(sizeof(kNames) / sizeof(kNames[0]) == sizeof(kPaths) / sizeof(kPaths[0]));

void demand(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

struct Case {
  std::string type, variant;
  int64_t outer, time, inner;

  DType b() const {
    if (type == "f32") return DType::kF32;
    if (type == "f16") return DType::kF16;
    if (type == "f64") return DType::kF64;
    if (type == "c64") return DType::kC64;
    return DType::kBF16;
  }
  DType a() const { return type == "mix" ? DType::kF32 : b(); }
  bool shares_a() const { return variant == "D" || variant == "LD" || variant == "BL1"; }
  int64_t elements() const { return outer * time * inner; }
  int64_t elements_of_a() const {
    if (variant == "D") return inner;
    if (variant == "LD") return time * inner;
    return variant == "BL1" ? outer * time : elements();
  }
};

// Arrays of one call.
struct Arrays {
  void *a, *x, *h, *reset, *y, *da;
};

// Numbers from 0 to 1 in any of the types, as `a` that is kept small.
__global__ void fill(void* to, int64_t count, DType type) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; k < count; k += stride) {
    const float value = 0.05f + 0.9f * static_cast<float>(k * 2654435761u % 65536) / 65536;
    switch (type) {
      case DType::kBF16:
        static_cast<uint16_t*>(to)[k] = static_cast<uint16_t>(__float_as_uint(value) >> 16);
        break;
      case DType::kF16:
        static_cast<uint16_t*>(to)[k] = static_cast<uint16_t>(0x3000 + k % 1024);
        break;
      case DType::kF64:
        static_cast<double*>(to)[k] = value;
        break;
      case DType::kC64:
        static_cast<float2*>(to)[k] = {0.7f * value, 0.5f * value};
        break;
      default:
        static_cast<float*>(to)[k] = value;
    }
  }
}

__global__ void fill_resets(uint8_t* to, int64_t count) {
  const int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (k < count) to[k] = k * 2654435761u % 100 == 0;
}

// What moves as many bytes: reads kReads arrays and writes kWrites.
template <int kReads, int kWrites>
__global__ void move(const uint4* from, uint4* to, int64_t count) {
  const int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (k >= count) return;
  uint4 sum = from[k];
#pragma unroll
  for (int r = 1; r < kReads; ++r) {
    const uint4 next = from[r * count + k];
    sum = {sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w};
  }
#pragma unroll
  for (int w = 0; w < kWrites; ++w) to[w * count + k] = sum;
}

Problem problem_of(const Case& c, Op op, const Arrays& in) {
  Problem p;
  p.op = op;
  p.state = state_of(c.b());
  p.outer = c.outer;
  p.time = c.time;
  p.inner = c.inner;
  const auto strided = [&](const void* data, DType type, int64_t outer, int64_t time,
                           int64_t inner) {
    Input operand{data, type, {}};
    operand.at.time_stride = time;
    operand.at.outer_axes = c.outer > 1;
    operand.at.outer[0] = {c.outer, outer};
    operand.at.inner_axes = c.inner > 1;
    operand.at.inner[0] = {c.inner, inner};
    return operand;
  };
  const auto whole = [&](const void* data, DType type) {
    return strided(data, type, c.time * c.inner, c.inner, 1);
  };
  p.a = whole(in.a, c.a());
  if (c.variant == "D") p.a = strided(in.a, c.a(), 0, 0, 1);
  if (c.variant == "LD") p.a = strided(in.a, c.a(), 0, c.inner, 1);
  if (c.variant == "BL1") p.a = strided(in.a, c.a(), c.time, 1, 0);
  p.x = whole(in.x, c.b());
  p.y = {in.y, c.b()};
  if (c.variant == "reset") p.reset = strided(in.reset, DType::kF32, c.time, 1, 0);
  if (op == Op::kCotangent) {
    p.h = whole(in.h, c.b());
    p.da_out = {in.da, c.shares_a() ? p.state : c.a()};
    p.da_over_time = c.variant == "D";
    if (c.variant == "LD") p.da_outer_run = c.outer;
    if (c.variant == "BL1") p.da_inner_run = c.inner;
  }
  return p;
}

class Timer {
 public:
  Timer() {
    demand(cudaStreamCreate(&stream));
    demand(cudaEventCreate(&begin_));
    demand(cudaEventCreate(&end_));
  }
  // us of a call queue(set); 0: it queues nothing.
  template <class F>
  double operator()(int calls, F&& queue) const {
    cudaGraph_t graph;
    cudaGraphExec_t program;
    demand(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    bool queued = true;
    for (int k = 0; k < calls && queued; ++k) queued = queue(k % kSets);
    demand(cudaStreamEndCapture(stream, &graph));
    std::vector<float> times;
    if (queued) {
      demand(cudaGraphInstantiate(&program, graph, 0));
      for (int turn = 0; turn < 8; ++turn) {
        demand(cudaEventRecord(begin_, stream));
        demand(cudaGraphLaunch(program, stream));
        demand(cudaEventRecord(end_, stream));
        demand(cudaEventSynchronize(end_));
        float ms = 0;
        demand(cudaEventElapsedTime(&ms, begin_, end_));
        if (turn > 0) times.push_back(ms * 1000 / calls);
      }
      demand(cudaGraphExecDestroy(program));
    }
    demand(cudaGraphDestroy(graph));
    if (!queued) return 0;
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }
  cudaStream_t stream;

 private:
  cudaEvent_t begin_, end_;
};

void measure(const Case& c, Op op, char* arena, void* workspace, const Device& device,
             const Timer& timer) {
  const bool cotangent = op == Op::kCotangent;
  const int64_t n = c.elements(), of_a = byte_size(c.a()), of_b = byte_size(c.b());
  size_t used = 0;
  const auto take = [&](int64_t bytes) {
    void* place = arena + used;
    used += align_up(bytes + 4096);
    return place;
  };
  Arrays sets[kSets];
  for (Arrays& set : sets) {
    set.a = take(c.elements_of_a() * of_a);
    set.x = take(n * of_b);
    set.h = take(cotangent ? n * of_b : 0);
    set.reset = take(c.outer * c.time);
    set.y = take(n * of_b);
    set.da = take(cotangent ? n * std::max<int64_t>(of_a, 4) : 0);
  }
  if (used > kArena || workspace_bytes(problem_of(c, op, sets[0])) > kWorkspace) {
    std::printf("too large\n");
    return;
  }
  const int64_t bytes = (cotangent ? 3 : 2) * n * of_b +
                        (c.shares_a() ? 0 : (cotangent ? 2 : 1) * c.elements_of_a() * of_a);
  const int reads = (cotangent ? 2 : 1) + !c.shares_a(), writes = 1 + (cotangent && !c.shares_a());
  const int64_t pieces = bytes / 16 / (reads + writes);
  const int calls = n * of_b > 60'000'000 ? 6 : 12;
  const auto blocks = static_cast<unsigned>(divide_up(pieces, 256));
  const double limit = timer(calls, [&](int set) {
    const auto* from = reinterpret_cast<const uint4*>(sets[set].a);
    auto* to = reinterpret_cast<uint4*>(sets[set].a) + reads * pieces;
    const auto kernel = reads == 1 ? move<1, 1> : reads == 3 ? move<3, 2> : move<2, 1>;
    kernel<<<blocks, 256, 0, timer.stream>>>(from, to, pieces);
    return true;
  });
  for (const Arrays& set : sets) {
    fill<<<2048, 256, 0, timer.stream>>>(set.a, c.elements_of_a(), c.a());
    fill<<<2048, 256, 0, timer.stream>>>(set.x, n, c.b());
    if (cotangent) fill<<<2048, 256, 0, timer.stream>>>(set.h, n, c.b());
    fill_resets<<<static_cast<unsigned>(divide_up(c.outer * c.time, 256)), 256, 0, timer.stream>>>(
        static_cast<uint8_t*>(set.reset), c.outer * c.time);
  }
  const double chosen = timer(calls, [&](int set) {
    return launch(problem_of(c, op, sets[set]), workspace, timer.stream) == cudaSuccess;
  });
  std::printf("%-4s (%lld,%lld,%lld) %-5s %s  limit %.1f us  chosen", c.type.c_str(),
              static_cast<long long>(c.outer), static_cast<long long>(c.time),
              static_cast<long long>(c.inner), c.variant.c_str(),
              cotangent ? "backward" : "forward ", limit);
  const auto print = [&](double us) {
    us > 0 ? std::printf(" %.3f", limit / us) : std::printf(" -");
  };
  print(chosen);
  double best = chosen;
  const char* best_name = nullptr;
  for (size_t k = 0; k < sizeof(kNames) / sizeof(kNames[0]); ++k) {
    const double us = timer(calls, [&](int set) {
      const Problem p = problem_of(c, op, sets[set]);
      if (p.da_over_runs() && !(sums_da(p) && kPaths[k].sums_da)) return false;
      const StreamTypes types = stream_types(p);
      const Call call{p, types, kernels_for(types), device, false, workspace, timer.stream};
      return kPaths[k].run(call) == cudaSuccess;
    });
    if (us == 0) continue;
    std::printf("  %s", kNames[k]);
    print(us);
    if (us < 0.97 * best) {
      best = us;
      best_name = kNames[k];
    }
  }
  std::printf(best_name ? "   <-- %s\n" : "\n", best_name);
  std::fflush(stdout);
}

}  // namespace
}  // namespace jax_scan

int main() {
  using namespace jax_scan;
  void *arena, *workspace;
  demand(cudaMalloc(&arena, kArena));
  demand(cudaMalloc(&workspace, kWorkspace));
  Device device;
  demand(current_device(device));
  const Timer timer;
  Case c;
  while (std::cin >> c.type >> c.outer >> c.time >> c.inner >> c.variant) {
    for (const Op op : {Op::kScan, Op::kCotangent}) {
      measure(c, op, static_cast<char*>(arena), workspace, device, timer);
    }
  }
}
