// A sum over time of what blocks have summed over their tiles.
#pragma once

#include "cuda/device.cuh"

namespace jax_scan {

// da summed over time: adds the tiles' sums, in a fixed order. A block of 32 x 8 threads serves 32
// channels.
template <class S>
__global__ void __launch_bounds__(256)
    sum_over_tiles_kernel(const __grid_constant__ Problem p, const S* sums_over_tiles,
                          int64_t tiles) {
  __shared__ S rows[8][33];
  const int64_t channel = int64_t{blockIdx.x} * 32 + threadIdx.x;
  S sum = S(0);
  if (channel < p.channels()) {
    for (int64_t k = threadIdx.y; k < tiles; k += 8) {
      sum = sum + sums_over_tiles[k * p.channels() + channel];
    }
  }
  rows[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && channel < p.channels()) {
    for (int k = 1; k < 8; ++k) sum = sum + rows[k][threadIdx.x];
    store_one(p.da_out, channel, sum);
  }
}

template <class S>
cudaError_t sum_over_tiles(const Problem& p, const S* sums_over_tiles, int64_t tiles,
                           cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.channels() + 31) / 32));
  sum_over_tiles_kernel<S><<<grid, dim3(32, 8), 0, stream>>>(p, sums_over_tiles, tiles);
  return cudaGetLastError();
}

}  // namespace jax_scan
