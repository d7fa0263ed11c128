// Sums of da over the lanes of a warp, and of what blocks have summed over their tiles.
#pragma once

#include "cuda/device.cuh"

namespace jax_scan {

inline constexpr unsigned kAllLanes = 0xffffffffu;

// The value of the lane whose number differs in the bits of `mask`.
template <class S>
__device__ __forceinline__ S exchanged(S value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}
template <class R>
__device__ __forceinline__ Complex<R> exchanged(Complex<R> value, int mask) {
  return {exchanged(value.re, mask), exchanged(value.im, mask)};
}

// The sums over a warp's lanes, for each step of a stage. Lanes exchange steps, so that each has
// half as many to go on adding, until it has one; from then on lanes come to have the same sum.
template <class S, int kSteps>
struct LaneSums {
  static constexpr int kSame = 32 / kSteps;  // lanes of a step

  // Leaves a lane's sum in the first value, and returns its step.
  template <int kDistance = 16, int kCount = kSteps>
  static __device__ __forceinline__ int add(S (&values)[kSteps], int lane) {
    if constexpr (kDistance == 0) {
      return 0;
    } else if constexpr (kCount == 1) {
      values[0] = values[0] + exchanged(values[0], kDistance);
      return add<kDistance / 2, 1>(values, lane);
    } else {
      constexpr int kHalf = kCount / 2;
      const bool upper = (lane & kDistance) != 0;
#pragma unroll
      for (int r = 0; r < kHalf; ++r) {
        const S mine = upper ? values[r + kHalf] : values[r];
        const S other = upper ? values[r] : values[r + kHalf];
        values[r] = mine + exchanged(other, kDistance);
      }
      return (upper ? kHalf : 0) + add<kDistance / 2, kHalf>(values, lane);
    }
  }
};

// Tiles' sums of da, row-major (major, tiles, minor). Of the sums over tiles, `side_by_side` of
// neighbouring major indices are neighbours in memory:
//     out (major / side_by_side, minor, side_by_side).
struct TileSums {
  int64_t major;
  int64_t tiles;
  int64_t minor;
  int64_t side_by_side;
};

inline constexpr int kSumThreads = 256;
inline constexpr int64_t kManyTiles = 256;

// Adds the tiles' sums, in a fixed order. A block serves neighbouring minor indices; kRows threads
// share one's tiles.
template <class S, int kRows, int kThreads>
__global__ void __launch_bounds__(kThreads)
    sum_over_tiles_kernel(const __grid_constant__ Output out, const S* sums,
                          const __grid_constant__ TileSums t) {
  constexpr int kColumns = kThreads / kRows;
  const int64_t blocks = (t.minor + kColumns - 1) / kColumns;
  const int64_t major = blockIdx.x / blocks;
  const int64_t minor = (blockIdx.x - major * blocks) * kColumns + threadIdx.x;
  S sum = S(0);
  if (minor < t.minor) {
    const S* mine = sums + major * t.tiles * t.minor + minor;
#pragma unroll(kRows == 8 ? 4 : 16)
    for (int64_t k = threadIdx.y; k < t.tiles; k += kRows) sum = sum + mine[k * t.minor];
  }
  if constexpr (kRows > 1) {
    __shared__ S rows[kRows][kColumns + 1];
    rows[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    int left = kRows;
    for (; left > 8; left /= 2) {
      if (threadIdx.y < left / 2) {
        sum = sum + rows[threadIdx.y + left / 2][threadIdx.x];
        rows[threadIdx.y][threadIdx.x] = sum;
      }
      __syncthreads();
    }
    if (threadIdx.y > 0) return;
    for (int k = 1; k < left; ++k) sum = sum + rows[k][threadIdx.x];
  }
  if (minor < t.minor) {
    const int64_t beside = major % t.side_by_side;
    store_one(out, (major / t.side_by_side * t.minor + minor) * t.side_by_side + beside, sum);
  }
}

template <class S, int kRows, int kThreads = kSumThreads>
cudaError_t sum_over_tiles(const Output& out, const S* sums, const TileSums& t,
                           cudaStream_t stream) {
  constexpr int kColumns = kThreads / kRows;
  const int64_t blocks = t.major * ((t.minor + kColumns - 1) / kColumns);
  sum_over_tiles_kernel<S, kRows, kThreads>
      <<<dim3(static_cast<unsigned>(blocks)), dim3(kColumns, kRows), 0, stream>>>(out, sums, t);
  return cudaGetLastError();
}

template <class S>
cudaError_t sum_over_tiles(const Output& out, const S* sums, const TileSums& t,
                           cudaStream_t stream) {
  // Many sums of few tiles: a thread for each.
  return t.tiles <= 16 && t.major * t.minor >= 1 << 16 ? sum_over_tiles<S, 1>(out, sums, t, stream)
                                                       : sum_over_tiles<S, 8>(out, sums, t, stream);
}

// da summed over time, of sums (tiles, channels).
template <class S>
cudaError_t sum_over_tiles(const Problem& p, const S* sums, int64_t tiles, cudaStream_t stream) {
  const TileSums t{1, tiles, p.channels(), 1};
  // Few sums of many tiles: more threads for each.
  return tiles >= kManyTiles ? sum_over_tiles<S, 128, 1024>(p.da_out, sums, t, stream)
                             : sum_over_tiles<S, 8>(p.da_out, sums, t, stream);
}

}  // namespace jax_scan
