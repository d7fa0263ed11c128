// What ours is compared with: an elementwise kernel, whose speed is the limit, and the three
// classic ways to scan on a GPU, written plainly: h[t] = a[t] h[t-1] + b[t] over float32 arrays of
// shape (batch, length, channels).
#include <cuda_runtime.h>

#include <cstdint>

namespace {

// ---- Elementwise --------------------------------------------------------------------------------

__device__ uint4 operator^(uint4 x, uint4 y) {
  return {x.x ^ y.x, x.y ^ y.y, x.z ^ y.z, x.w ^ y.w};
}
__device__ uint4 operator+(uint4 x, uint4 y) {
  return {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
}

struct Arrays {
  const uint4* in[3];
  uint4* out[2];
};

// The exclusive or of kReads arrays, and as a second result its sum with the first of them. On
// bits, so that no result is out of range. Each thread has kUnroll words of 16 bytes.
template <int kReads, int kWrites, int kUnroll>
__global__ void elementwise_kernel(Arrays arrays, int64_t count) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x * kUnroll + threadIdx.x;
  uint4 x[kUnroll][kReads];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t k = first + u * blockDim.x;
#pragma unroll
    for (int r = 0; r < kReads; ++r) {
      if (k < count) x[u][r] = arrays.in[r][k];
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t k = first + u * blockDim.x;
    if (k >= count) return;
    uint4 y = x[u][0];
#pragma unroll
    for (int r = 1; r < kReads; ++r) y = y ^ x[u][r];
    arrays.out[0][k] = y;
    if constexpr (kWrites > 1) arrays.out[1][k] = y + x[u][0];
  }
}

template <int kReads, int kWrites>
void launch_elementwise(Arrays arrays, int unroll, int64_t count, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const auto blocks = static_cast<unsigned>((count + kThreads * unroll - 1) / (kThreads * unroll));
  if (unroll == 1) {
    elementwise_kernel<kReads, kWrites, 1><<<blocks, kThreads, 0, stream>>>(arrays, count);
  } else {
    elementwise_kernel<kReads, kWrites, 4><<<blocks, kThreads, 0, stream>>>(arrays, count);
  }
}

// h = factor * h_before + offset: one step, or any number of them.
struct Map {
  float factor = 1, offset = 0;
};

__device__ Map then(Map first, Map second) {
  return {second.factor * first.factor, second.factor * first.offset + second.offset};
}

// ---- One thread per channel ---------------------------------------------------------------------

__global__ void channel_kernel(const float* a, const float* b, float* h, int64_t batch,
                               int64_t length, int64_t channels) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= batch * channels) return;
  const int64_t start = index / channels * length * channels + index % channels;
  float state = 0;
#pragma unroll 16
  for (int64_t t = 0; t < length; ++t) {
    const int64_t k = start + t * channels;
    state = a[k] * state + b[k];
    h[k] = state;
  }
}

// ---- Tiles of 32 steps x 32 channels ------------------------------------------------------------

constexpr int kTile = 32;

// A warp scans a channel's 32 steps: Hillis and Steele's scan with shuffles.
__device__ Map scan_warp(Map map) {
  for (int distance = 1; distance < kTile; distance *= 2) {
    const Map before = {__shfl_up_sync(~0u, map.factor, distance),
                        __shfl_up_sync(~0u, map.offset, distance)};
    if (static_cast<int>(threadIdx.x) >= distance) map = then(before, map);
  }
  return map;
}

// A block of 32 x 32 threads walks along 32 channels. Rows are read and written with a lane for
// each channel, scanned with a lane for each step.
__global__ void tile_kernel(const float* a, const float* b, float* h, int64_t length,
                            int64_t channels) {
  __shared__ float tile_a[kTile][kTile + 1], tile_b[kTile][kTile + 1];
  const int lane = threadIdx.x, warp = threadIdx.y;
  const int64_t channel = int64_t{blockIdx.x} * kTile + lane;
  const int64_t start = int64_t{blockIdx.y} * length * channels + channel;
  float state = 0;  // of channel `warp` of the block
  for (int64_t first = 0; first < length; first += kTile) {
    const bool inside = first + warp < length && channel < channels;
    const int64_t k = start + (first + warp) * channels;
    tile_a[warp][lane] = inside ? a[k] : 1;
    tile_b[warp][lane] = inside ? b[k] : 0;
    __syncthreads();
    const Map map = scan_warp({tile_a[lane][warp], tile_b[lane][warp]});
    const float value = map.factor * state + map.offset;
    tile_b[lane][warp] = value;
    state = __shfl_sync(~0u, value, kTile - 1);
    __syncthreads();
    if (inside) h[k] = tile_b[warp][lane];
    __syncthreads();
  }
}

// ---- Three passes over chunks -------------------------------------------------------------------

constexpr int64_t kChunk = 128;

// The map of each chunk: maps[batch][chunk][channel].
__global__ void chunk_kernel(const float* a, const float* b, Map* maps, int64_t length,
                             int64_t channels) {
  const int64_t channel = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, chunk = blockIdx.y;
  if (channel >= channels) return;
  const int64_t start = int64_t{blockIdx.z} * length * channels + channel;
  const int64_t end = min(length, (chunk + 1) * kChunk);
  Map map;
#pragma unroll 8
  for (int64_t t = chunk * kChunk; t < end; ++t) {
    const int64_t k = start + t * channels;
    map = then(map, {a[k], b[k]});
  }
  maps[(int64_t{blockIdx.z} * gridDim.y + chunk) * channels + channel] = map;
}

// The state that enters each chunk takes the place of its map's offset.
__global__ void carry_kernel(Map* maps, int64_t batch, int64_t chunks, int64_t channels) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= batch * channels) return;
  Map* map = maps + index / channels * chunks * channels + index % channels;
  float state = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk, map += channels) {
    const float entering = state;
    state = map->factor * state + map->offset;
    map->offset = entering;
  }
}

__global__ void finish_kernel(const float* a, const float* b, float* h, const Map* maps,
                              int64_t length, int64_t channels) {
  const int64_t channel = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, chunk = blockIdx.y;
  if (channel >= channels) return;
  const int64_t start = int64_t{blockIdx.z} * length * channels + channel;
  const int64_t end = min(length, (chunk + 1) * kChunk);
  float state = maps[(int64_t{blockIdx.z} * gridDim.y + chunk) * channels + channel].offset;
#pragma unroll 8
  for (int64_t t = chunk * kChunk; t < end; ++t) {
    const int64_t k = start + t * channels;
    state = a[k] * state + b[k];
    h[k] = state;
  }
}

unsigned blocks(int64_t threads, int64_t block) {
  return static_cast<unsigned>((threads + block - 1) / block);
}

}  // namespace

extern "C" {

// Of `count` words of 16 bytes. `unroll` is 1 or 4; `reads` and `writes` 1 and 1, 2 and 1 or 3
// and 2.
cudaError_t elementwise(int reads, int writes, int unroll, const uint4* in0, const uint4* in1,
                        const uint4* in2, uint4* out0, uint4* out1, int64_t count,
                        cudaStream_t stream) {
  if (unroll != 1 && unroll != 4) return cudaErrorInvalidValue;
  const Arrays arrays = {{in0, in1, in2}, {out0, out1}};
  if (reads == 1 && writes == 1) {
    launch_elementwise<1, 1>(arrays, unroll, count, stream);
  } else if (reads == 2 && writes == 1) {
    launch_elementwise<2, 1>(arrays, unroll, count, stream);
  } else if (reads == 3 && writes == 2) {
    launch_elementwise<3, 2>(arrays, unroll, count, stream);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

// Bytes of `workspace`, which the last of them needs.
int64_t workspace_bytes(int64_t batch, int64_t length, int64_t channels) {
  return batch * blocks(length, kChunk) * channels * static_cast<int64_t>(sizeof(Map));
}

cudaError_t thread_per_channel(const float* a, const float* b, float* h, void*, int64_t batch,
                               int64_t length, int64_t channels, cudaStream_t stream) {
  channel_kernel<<<blocks(batch * channels, 32), 32, 0, stream>>>(a, b, h, batch, length, channels);
  return cudaGetLastError();
}

cudaError_t tiles(const float* a, const float* b, float* h, void*, int64_t batch, int64_t length,
                  int64_t channels, cudaStream_t stream) {
  const dim3 grid(blocks(channels, kTile), static_cast<unsigned>(batch));
  tile_kernel<<<grid, dim3(kTile, kTile), 0, stream>>>(a, b, h, length, channels);
  return cudaGetLastError();
}

cudaError_t three_passes(const float* a, const float* b, float* h, void* workspace, int64_t batch,
                         int64_t length, int64_t channels, cudaStream_t stream) {
  Map* maps = static_cast<Map*>(workspace);
  const unsigned chunks = blocks(length, kChunk);
  const dim3 grid(blocks(channels, 128), chunks, static_cast<unsigned>(batch));
  chunk_kernel<<<grid, 128, 0, stream>>>(a, b, maps, length, channels);
  carry_kernel<<<blocks(batch * channels, 128), 128, 0, stream>>>(maps, batch, chunks, channels);
  finish_kernel<<<grid, 128, 0, stream>>>(a, b, h, maps, length, channels);
  return cudaGetLastError();
}
}
