// How the state gets from tile to tile.
//
// A block that has composed its tile's map sends it to the chain: warps that do nothing but carry
// the states of 32 channels each through the maps of all tiles, one after the other. From there the
// block receives the state that enters its tile. Maps are applied to states in the order of time,
// whatever the order in which they come, so that results do not depend on timing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/plan.h"

namespace jax_scan {

// The map h -> a h + b, or with a tag in place of `a` something else. All bits set is what a place
// holds before anything has been sent.
enum class Sent : uint32_t {
  kNothing = 0xffffffffu,
  kUnknown = 0xfffffffeu,  // the tile needs the state that enters before it can tell what comes out
  kState = 0xfffffffdu,    // b is a state
};

template <class S>
struct alignas(2 * sizeof(S)) Packet {
  static constexpr int kWords = 2 * sizeof(S) / 4;
  static constexpr int kTagWord = sizeof(S) / 4 - 1;  // of a; the tags are NaNs there
  uint32_t word[kWords];

  __device__ static Packet map(Affine<S> m) {
    Packet p = internal::bit_cast<Packet>(m);
    // One NaN is as good as another, but must not be taken for a tag.
    if (p.word[kTagWord] >= static_cast<uint32_t>(Sent::kState)) p.word[kTagWord] = 0x7fffffffu;
    return p;
  }
  __device__ static Packet tagged(Sent tag, S b) {
    Packet p = internal::bit_cast<Packet>(Affine<S>{S(0), b});
    p.word[kTagWord] = static_cast<uint32_t>(tag);
    return p;
  }
  __device__ bool is(Sent tag) const { return word[kTagWord] == static_cast<uint32_t>(tag); }
  __device__ bool is_map() const { return word[kTagWord] < static_cast<uint32_t>(Sent::kState); }
  __device__ Affine<S> map() const { return internal::bit_cast<Affine<S>>(*this); }
  __device__ S state() const { return map().b; }
};

template <class S>
__device__ __forceinline__ Packet<S> receive(const Packet<S>* place) {
  return load_whole(place);
}
template <class S>
__device__ __forceinline__ void send(Packet<S>* place, Packet<S> packet) {
  store_whole(place, packet);
}

// The places of all tiles' packets: those to the chain, and those from it.
template <class S>
struct Mail {
  Packet<S>* maps;
  Packet<S>* states;
  int64_t channels;  // including those that only fill up a tile

  __device__ Packet<S>* map(int64_t tile, int64_t channel) const {
    return maps + tile * channels + channel;
  }
  __device__ Packet<S>* state(int64_t tile, int64_t channel) const {
    return states + tile * channels + channel;
  }
};

// Carries a warp's states through the tiles that have sent something, from `tile` on, at most
// kBatch. Returns how many they were.
template <int kBatch, class S>
__device__ __forceinline__ int carry_some(const Mail<S>& mail, int tiles, int tile, int64_t channel,
                                          S& s) {
  const bool inside = channel < mail.channels;
  const Packet<S>* from = mail.map(tile, inside ? channel : 0);
  Packet<S>* to = mail.state(tile + 1, inside ? channel : 0);
  const int count = min(kBatch, tiles - 1 - tile);

  Packet<S> packets[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) packets[j] = receive(from + min(j, count - 1) * mail.channels);

  // In a straight line as far as all lanes have maps, and states to which they can be applied.
  S states[kBatch];
  bool good = true;
  int mine = 0;
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const S before = j == 0 ? s : states[j - 1];
    good = good && j < count && packets[j].is_map() && state_within(before);
    mine += good ? 1 : 0;
    states[j] = apply(packets[j].map(), before);
  }
  const int ready = least_of_warp(inside ? mine : count);
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    if (j < ready) {
      if (inside) send(to + j * mail.channels, Packet<S>::tagged(Sent::kState, states[j]));
      s = states[j];
    }
  }
  if (ready > 0) return ready;

  // Or through a single tile.
  Packet<S> packet = packets[0];
  if (!__all_sync(0xffffffffu, !inside || !packet.is(Sent::kNothing))) return 0;
  if (inside) {
    if (packet.is_map() && state_within(s)) {
      s = apply(packet.map(), s);
    } else {
      while (!packet.is(Sent::kState)) packet = receive(from);
      s = packet.state();
    }
    send(to, Packet<S>::tagged(Sent::kState, s));
  }
  return 1;
}

// Carries the states of this warp's channels, `warp`-th of `warps`, from the first tile, which
// `init(channel)` enters, to the last. A warp that has several times 32 channels takes turns.
// `memory`: one S and one int32 for each thread and turn.
template <class S, class F>
__device__ void carry_states(const Mail<S>& mail, int tiles, int warp, int warps, char* memory,
                             F&& init) {
  const int lane = threadIdx.x % 32;
  const auto bundles = static_cast<int>((mail.channels + 31) / 32);
  const int turns = (bundles - warp + warps - 1) / warps;
  // With many channels, tiles of one of them come few at a time. At (1,65536,256) half a batch
  // makes 0.63 of the limit instead of 0.62, at (1,1048576,64) 0.39 instead of 0.48.
  const bool many = bundles >= 8;
  auto* const kept = reinterpret_cast<S*>(memory) + threadIdx.x;
  auto* const done =
      reinterpret_cast<int*>(memory + kMostTurns * kTileThreads * sizeof(S)) + threadIdx.x;
  for (int k = 0; k < turns; ++k) {
    kept[k * blockDim.x] = init(static_cast<uint32_t>(warp + k * warps) * 32 + lane);
    done[k * blockDim.x] = 0;
  }
  for (bool busy = turns > 0; busy;) {
    busy = false;
    for (int k = 0; k < turns; ++k) {
      const int64_t channel = int64_t{warp + k * warps} * 32 + lane;
      const int tile = done[k * blockDim.x];
      if (tile == tiles - 1) continue;
      busy = true;
      S s = kept[k * blockDim.x];
      done[k * blockDim.x] =
          tile + (many ? carry_some<32 / sizeof(S)>(mail, tiles, tile, channel, s)
                       : carry_some<64 / sizeof(S)>(mail, tiles, tile, channel, s));
      kept[k * blockDim.x] = s;
    }
  }
}

}  // namespace jax_scan
