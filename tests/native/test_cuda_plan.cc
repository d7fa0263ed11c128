// Random problems through cuda/plan.h, which is host code and needs no GPU: tiles cover the
// problem, and the workspace that is asked for when JAX lowers a call holds what any path takes,
// also when the call is divided over devices.
//
//   test_cuda_plan [problems]

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/plan.h"

namespace {

using namespace jax_scan;

// The kernels of chained.cuh, as launch.cc has them.
struct Kernel {
  bool line;
  int channels_of_thread;
  int bytes;  // of an element
  int state_bytes;
};
constexpr Kernel kKernels[] = {{true, 1, 4, 4},  {true, 1, 2, 4},  {true, 1, 8, 8},
                               {false, 4, 4, 4}, {false, 1, 4, 4}, {false, 4, 2, 4},
                               {false, 2, 8, 8}};

// The types of a, b and h of the kernels of boxed.cuh.
constexpr StreamTypes kBoxedKernels[] = {{DType::kF32, DType::kF32, DType::kF32},
                                         {DType::kBF16, DType::kBF16, DType::kBF16},
                                         {DType::kF32, DType::kBF16, DType::kBF16},
                                         {DType::kF64, DType::kF64, DType::kF64},
                                         {DType::kC64, DType::kC64, DType::kC64}};

// The kernels of cluster.cuh.
struct ClusterKernel {
  bool line;
  int channels_of_thread;
  int steps;
  int bytes;
};
constexpr ClusterKernel kClusterKernels[] = {
    {true, 1, 16, 4}, {false, 4, 8, 4}, {false, 1, 8, 4}, {false, 4, 8, 2}};

int failures = 0;

void expect(bool holds, const char* what, Op op, int64_t outer, int64_t time, int64_t inner,
            DType state) {
  if (holds || ++failures > 10) return;
  std::printf("%s: op %d, (%lld, %lld, %lld), state %s\n", what, static_cast<int>(op),
              static_cast<long long>(outer), static_cast<long long>(time),
              static_cast<long long>(inner), name(state));
}

void check(Op op, int64_t outer, int64_t time, int64_t inner, DType state) {
  const int64_t channels = outer * inner;
  const size_t all = workspace_bytes(op, outer, time, inner, state);
  const auto holds = [&](bool what, const char* text) {
    expect(what, text, op, outer, time, inner, state);
  };
  holds(all <= channels * workspace_bytes_per_channel(time, state), "workspace per channel");
  for (const ClusterKernel& k : kClusterKernels) {
    if (!k.line && inner % k.channels_of_thread != 0) continue;
    for (const int most_ranks : {kMostRanks, kPortableRanks}) {
      const ClusterPlan plan = plan_cluster(k.line, k.channels_of_thread, k.steps, k.bytes,
                                            channels, time, 132, most_ranks);
      if (plan.groups == 0) continue;
      const int width = k.channels_of_thread << plan.lanes_log2;
      const int64_t tile = int64_t{plan.warps} * (32 >> plan.lanes_log2) * k.steps;
      holds(width <= 32 && plan.lanes_log2 <= (k.line ? 0 : 5), "channels of a cluster");
      holds(plan.groups * width >= channels && plan.groups <= UINT16_MAX,
            "clusters cover channels");
      holds(plan.ranks * tile >= time && plan.ranks <= most_ranks, "a cluster covers time");
      holds(plan.warps == kClusterWarps || 2 * plan.warps == kClusterWarps, "warps of a block");
    }
  }
  for (const StreamTypes& t : kBoxedKernels) {
    const int size = byte_size(t.b);
    if (op == Op::kTangent || inner * size % 16 != 0) continue;
    const int streamed = (op == Op::kCotangent ? 2 : 1) * size, copied = streamed + byte_size(t.a);
    struct Way {
      BoxedA a;
      Traffic traffic;
    };
    // a in full, the same for all outer indices, for all inner ones, and without time.
    const Way ways[] = {{BoxedA::kBoxes, {copied, copied, copied - size}},
                        {BoxedA::kBoxes, {copied, streamed, size}},
                        {BoxedA::kRuns, {streamed, streamed, size}},
                        {BoxedA::kFixed, {streamed, streamed, size}}};
    for (const int multiprocessors : {0, 1, 78, 132, 160}) {
      for (const auto& [way, traffic] : ways) {
        const BoxedPlan plan = plan_boxed(op, t, way, way == BoxedA::kBoxes, traffic, outer, inner,
                                          multiprocessors, 227 * 1024, 228 * 1024);
        if (plan.blocks == 0) continue;
        const int warps = static_cast<int>(divide_up(plan.width, size == 2 ? 64 : 32));
        holds(plan.width <= std::min<int64_t>(kWidestBox, inner) && plan.width * size % 128 == 0,
              "width of a box");
        holds(int64_t{plan.strips} * plan.width >= inner && plan.blocks == outer * plan.strips,
              "boxes cover channels");
        holds(plan.steps == long_box(size) || 2 * plan.steps == long_box(size), "steps of a box");
        holds(plan.slots >= 2 && plan.slots <= kMostBoxSlots && plan.teams >= 1 &&
                  plan.teams <= plan.slots && plan.teams * warps <= kMostBoxWarps,
              "teams and their slots");
        holds(plan.teams * warps < box_warps(plan.steps, size), "registers of a block");
        const int run = way == BoxedA::kRuns ? kRunPlace : 0;
        holds(plan.slots * (plan.steps * plan.width * traffic.copied + run) <= plan.shared_bytes &&
                  plan.shared_bytes <= plan.most_bytes,
              "shared memory of boxes");
        holds(run == 0 || plan.steps * byte_size(t.a) <= run, "a run's place");
      }
    }
  }
  for (const Kernel& k : kKernels) {
    if (k.state_bytes != byte_size(state)) continue;
    if (!k.line && inner % k.channels_of_thread != 0) continue;
    const int steps = segment_steps(k.line, k.channels_of_thread, k.bytes);
    const Tiling t =
        chained_tiling(k.line, k.channels_of_thread, steps, k.state_bytes, channels, time);
    // A scan has no sums.
    const size_t bytes = op == Op::kCotangent ? t.bytes : t.sums_offset;
    holds(bytes <= all, "workspace of the chained path");
    holds(t.channels <= kMostChannels && t.lanes_log2 <= 5, "channels of a tile");
    holds(t.tiles * t.tile_steps >= time, "tiles cover time");
    holds(int64_t{t.groups} * t.channels >= channels, "tiles cover channels");
    for (const int64_t resident : {1, 40, 264, 396}) {
      const auto [blocks, team] = plan_chain(t, resident);
      holds(blocks == 0 || 16 * blocks <= std::max<int64_t>(resident, 16), "the chain is small");
      const int64_t bundles = divide_up(int64_t{t.groups} * t.channels, kBundle);
      const int64_t turns = team == 1 ? kMostTurns : 1;
      holds(t.warps % team == 0, "warps of a team");
      holds(blocks == 0 || blocks * (t.warps / team) * turns >= bundles, "the chain carries all");
    }
  }
}

void check_piped(const PipedKernel& k, PipedA way, Op op, int64_t outer, int64_t time,
                 int64_t inner) {
  const PipedTiling t = piped_tiling(op, k, way, outer, time, inner);
  if (t.width == 0) return;
  const DType state = k.complex ? DType::kC64 : k.b_bytes == 8 ? DType::kF64 : DType::kF32;
  const auto holds = [&](bool what, const char* text) {
    expect(what, text, op, outer, time, inner, state);
  };
  const PipedRing ring = k.ring(op, way);
  holds(t.tile_steps == t.segments * ring.steps && t.segments >= 1 &&
            t.lanes * k.vector == t.width && t.segments * t.lanes <= kPipedWalkers,
        "threads of a piped tile");
  // Pairs share what enters a segment; resets have room for so many segments.
  holds((k.vector == 1 || t.segments > 1) && t.lanes >= kPipedLeastLanes, "lanes of a piped tile");
  holds(t.width <= kPipedWalkers, "one thread speaks for each channel");
  holds(int64_t{t.tiles} * t.tile_steps >= time, "piped tiles cover time");
  holds(int64_t{t.strips} * t.width >= inner && (t.strips - 1) * int64_t{t.width} < inner &&
            t.groups == t.strips * (way == PipedA::kStack ? 1 : outer),
        "piped tiles cover channels");
  const int piece = 16 / std::min(k.a_bytes, k.b_bytes);
  holds(t.boxes ? t.width % piece == 0 && inner % piece == 0 && t.tile_steps <= 256 : t.strips == 1,
        "boxes are what can be copied");
  holds(t.ahead >= 2, "operands of piped tiles on their way");
  holds(way == PipedA::kStack || t.bytes <= workspace_bytes(op, outer, time, inner, state),
        "workspace of the piped path");
  const int64_t bundles = divide_up(outer * inner, kBundle);
  const int warps = kPipedChainWarps;
  for (const int multiprocessors : {16, 78, 132, 160}) {
    const PipedTiling plan =
        plan_piped(op, k, way, outer, time, inner, multiprocessors, kPipedSharedBytes);
    if (plan.width == 0) continue;
    const int64_t turns = plan.chain_team == 1 ? kMostTurns : 1;
    holds(16 * plan.chain_blocks <= uint32_t(multiprocessors) && warps % plan.chain_team == 0,
          "the chain is small");
    holds(t.tiles == 1 ? plan.chain_blocks == 0
                       : plan.chain_blocks * (warps / plan.chain_team) * turns >= bundles,
          "the chain carries all");
    holds(plan.blocks >= 1 && plan.chain_blocks + plan.blocks <= uint32_t(multiprocessors),
          "all blocks are there at once");
    if (way != PipedA::kStack) continue;
    holds(int64_t{plan.parts} * plan.outer_part >= outer &&
              (plan.parts - 1) * int64_t{plan.outer_part} < outer && plan.parts <= kMostParts,
          "parts cover outer indices");
    Problem p;
    p.op = op;
    p.state = state;
    p.outer = p.da_outer_run = outer;
    p.time = time;
    p.inner = inner;
    holds(!sums_over_runs(p) || plan.bytes <= da_sums_bytes(p), "workspace of stacks");
  }
}

void check_lined(Op op, int64_t channels, int64_t time) {
  if (op == Op::kTangent) return;
  for (const int bytes : {2, 4, 8}) {
    for (const int multiprocessors : {0, 1, 78, 132, 160}) {
      const int shared_bytes = (time % 2 == 0 ? 227 : 99) * 1024;
      const LinedPlan plan = plan_lined(op, bytes, channels, time, multiprocessors, shared_bytes);
      if (plan.blocks == 0) continue;
      const auto holds = [&](bool what, const char* text) {
        expect(what, text, op, channels, time, 1, DType::kF32);
      };
      // Of a channel that begins with a row's last element, if it can.
      const int64_t of_row = 128 / bytes;
      const int64_t rows = divide_up(time + (time % of_row == 0 ? 0 : of_row - 1), of_row);
      holds(plan.rows >= 1 && plan.rows <= 32 && plan.rows * 128 <= plan.operand_bytes &&
                plan.operand_bytes % 1024 == 0,
            "rows of a stage");
      holds(int64_t{plan.stages} * plan.rows >= rows, "stages cover a channel");
      holds(plan.blocks <= std::min<int64_t>(channels, std::max(multiprocessors, 1)),
            "blocks of the lined path");
      holds(plan.ahead >= 1 && plan.ahead <= plan.slots && plan.slots <= kMostLineSlots &&
                plan.warps >= 1 && plan.warps <= kMostLineWarps,
            "slots and warps of the lined path");
      const int operands = op == Op::kCotangent ? 3 : 2;
      const int results = plan.warps * (operands - 1) * kLineStageBytes;
      holds(plan.slots * operands * plan.operand_bytes + results <= plan.shared_bytes &&
                plan.shared_bytes <= plan.most_bytes,
            "shared memory of the lined path");
    }
  }
}

void check_resident(Op op, int64_t outer, int64_t time, int64_t inner) {
  if (op == Op::kTangent) return;
  for (const int multiprocessors : {2, 78, 132, 160}) {
    for (const int bytes : {2, 4}) {
      const bool uses_h = op == Op::kCotangent && time % 2 == 0;
      const int shared_bytes = (time % 3 == 0 ? 99 : 227) * 1024;
      const ResidentPlan plan =
          plan_resident(op, bytes, uses_h, outer, time, inner, multiprocessors, shared_bytes);
      if (plan.blocks == 0) continue;
      const auto holds = [&](bool what, const char* text) {
        expect(what, text, op, outer, time, inner, DType::kF32);
      };
      const int64_t width = int64_t{1} << plan.lanes_log2;
      const int64_t segments = plan.warps * 32 / width;
      const int64_t length = segments * (plan.steps + plan.held);
      holds(plan.blocks <= multiprocessors && plan.blocks == outer * plan.strips * plan.pieces,
            "one wave of blocks");
      holds(plan.pieces * length >= time && (plan.pieces - 1) * length < time, "pieces cover time");
      holds(plan.strips * width >= inner && (plan.strips - 1) * width < inner && width <= 32 &&
                (plan.boxes || width == inner),
            "strips cover channels");
      holds(plan.warps >= 1 && plan.warps <= kResidentWarps && plan.steps >= 1 &&
                (!plan.boxes || plan.steps <= 256) &&
                (width == 32 ? bytes * plan.steps % 4 == 0 : plan.steps % 2 == 1),
            "segments of a block");
      const int64_t operands = uses_h ? 3 : 2;
      holds(operands * plan.warps * 32 * plan.steps * bytes <= plan.shared_bytes &&
                plan.shared_bytes <= plan.most_bytes &&
                plan.most_bytes + kResidentBytes <= shared_bytes,
            "shared memory of a piece");
      holds(static_cast<size_t>(plan.blocks) * width * 16 <=
                workspace_bytes(op, outer, time, inner, DType::kF32),
            "workspace of the resident path");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int problems = argc > 1 ? std::atoi(argv[1]) : 200000;
  std::mt19937_64 random(1);
  const auto pick = [&](int bits) {
    return 1 + static_cast<int64_t>(random() % (uint64_t{1} << random() % bits));
  };
  for (int k = 0; k < problems; ++k) {
    const DType states[] = {DType::kF32, DType::kF64, DType::kC64, DType::kC128};
    const Op op = static_cast<Op>(random() % 3);
    const int64_t outer = pick(14), time = pick(20), inner = pick(13);
    check(op, outer, time, inner, states[random() % 4]);
    for (const PipedKernel& k : kPipedKernels) {
      for (const PipedA way : {PipedA::kRows, PipedA::kFixed, PipedA::kRuns, PipedA::kStack}) {
        check_piped(k, way, op, outer, time, inner);
      }
    }
    check_lined(op, outer, time);
    check_resident(op, outer, time, pick(8));
    check_resident(op, pick(3), time, int64_t{1} << random() % 5);
  }
  std::printf("%d of %d problems failed\n", failures, problems);
  return failures != 0;
}
