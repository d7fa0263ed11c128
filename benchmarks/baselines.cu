// The three classic ways to scan on a GPU, written plainly: h[t] = a[t] h[t-1] + b[t] over float32
// arrays of shape (batch, length, channels). What ours is compared with, not built upon.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

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

// A block of 32 x 32 threads walks along 32 channels. Rows are read and written with a lane for each
// channel, scanned with a lane for each step.
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
