// What the tiles of a scan tell each other through global memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/plan.h"

namespace jax_scan {

// What a place of the packets' array holds.
enum Kind : uint32_t { kNothing = 0, kMap = 1, kState = 2 };

struct alignas(16) MapPacket {
  uint32_t payload[2];
  uint32_t kind;
  uint32_t unused;
};

// The packets of one lane: place k of tile t lies at base[t * tile_stride + k * lanes].
template <class S>
class Mailbox {
 public:
  __device__ Mailbox(MapPacket* packets, int lanes, int64_t groups, int64_t group, int lane)
      : base_(packets + group * kMapPackets * lanes + lane),
        tile_stride_(groups * kMapPackets * lanes),
        lanes_(lanes) {}

  __device__ __forceinline__ void send(int64_t tile, Affine<S> map) const { put(tile, map, kMap); }
  __device__ __forceinline__ void send(int64_t tile, S state) const { put(tile, state, kState); }

  // Reads what a tile has sent: a map, or a state as `map.b`.
  __device__ __forceinline__ Kind receive(int64_t tile, Affine<S>& map) const {
    MapPacket in[kMapPackets];
#pragma unroll
    for (int k = 0; k < kMapPackets; ++k) in[k] = load_whole(place(tile, k));
    bool is_map = true, is_state = true;
#pragma unroll
    for (int k = 0; k < kMapPackets; ++k) {
      is_map = is_map && in[k].kind == kMap;
      is_state = is_state && (k * 8 >= static_cast<int>(sizeof(S)) || in[k].kind == kState);
    }
    Words<Affine<S>> words;
#pragma unroll
    for (int k = 0; k < Words<Affine<S>>::kCount; ++k) words.word[k] = in[k / 2].payload[k % 2];
    map = internal::bit_cast<Affine<S>>(words);
    if (is_state) map.b = map.a;  // a state lies at the front
    return is_state ? kState : is_map ? kMap : kNothing;
  }

 private:
  static constexpr int kMapPackets = packets_per_map(sizeof(S));

  __device__ __forceinline__ MapPacket* place(int64_t tile, int k) const {
    return base_ + tile * tile_stride_ + k * lanes_;
  }

  template <class T>
  __device__ __forceinline__ void put(int64_t tile, T value, Kind kind) const {
    const Words<T> words = internal::bit_cast<Words<T>>(value);
#pragma unroll
    for (int k = 0; 2 * k < Words<T>::kCount; ++k) {
      const uint32_t second = 2 * k + 1 < Words<T>::kCount ? words.word[2 * k + 1] : 0u;
      store_whole(place(tile, k), MapPacket{{words.word[2 * k], second}, kind, 0});
    }
  }

  MapPacket* base_;
  int64_t tile_stride_;
  int lanes_;
};

}  // namespace jax_scan
