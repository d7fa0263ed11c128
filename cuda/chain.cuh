// How the state gets from tile to tile.
//
// Each tile has a place for each of its channels. A block that has composed its tile's map puts it
// there; the chain puts the state that leaves the tile in its stead, for the block of the next tile
// to find. The chain are warps that do nothing else: a team of them carries the states of 32
// channels, a bundle, through the maps of all tiles. Its warps take batches of tiles in turn. Each
// reads its batch's maps ahead, as they come; the state goes from one to the next in shared memory
// (Baton), so that a batch takes no longer than its multiply-adds once its maps are there, however
// long it takes to read them. Maps are applied to states in the order of time, whatever the order
// in which they come, so that results do not depend on timing. Where the chain cannot be many tiles
// behind, a block applies the last tiles' maps itself (look_back).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

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

// The places of all tiles, [bundle][tile][channel of the bundle].
template <class S>
struct Mail {
  Packet<S>* places;
  int64_t tiles;
  uint32_t channels;  // including those that only fill up a tile

  __device__ Packet<S>* at(int64_t tile, uint32_t channel) const {
    return places + (int64_t{channel / kBundle} * tiles + tile) * kBundle + channel % kBundle;
  }
};

// What leaves a tile whose place is `last`, if it is known already: the newest state in the places
// of the last kLookBack tiles, through the maps of the tiles after it. That saves the way to the
// chain and back. The maps are applied one by one, as the chain applies them, so that the state has
// the same bits.
template <class S>
__device__ __forceinline__ Packet<S> look_back(const Packet<S>* last) {
  Packet<S> packets[kLookBack];
#pragma unroll
  for (int j = 0; j < kLookBack; ++j) packets[j] = receive(last - j * kBundle);
  bool known = false;
  S state(0);
#pragma unroll
  for (int j = kLookBack - 1; j >= 0; --j) {
    const bool through = packets[j].is_map() && known && state_within(state);
    const S leaving = apply(packets[j].map(), state);
    known = through || packets[j].is(Sent::kState);
    state = through ? leaving : packets[j].state();
  }
  return Packet<S>::tagged(known ? Sent::kState : Sent::kNothing, state);
}

// A bundle's state on its way through the tiles, in shared memory. With each word goes the number
// of tiles that it has come through: who finds the number that it waits for has the word, too, and
// no fence is needed.
template <class S>
class Baton {
 public:
  static constexpr int kBytes = kBundle * Words<S>::kCount * 8;
  struct State {
    S s;
    int tiles;
  };

  // The `index`-th of those that lie at `memory`.
  __device__ Baton(char* memory, int index)
      : words_(reinterpret_cast<volatile uint64_t*>(memory + index * kBytes) + threadIdx.x % 32) {}

  __device__ __forceinline__ void pass(S s, int tiles) const {
    const Words<S> w = internal::bit_cast<Words<S>>(s);
#pragma unroll
    for (int k = 0; k < Words<S>::kCount; ++k) {
      words_[k * kBundle] = uint64_t{static_cast<uint32_t>(tiles)} << 32 | w.word[k];
    }
  }
  __device__ __forceinline__ State look() const {
    Words<S> w;
    int tiles = INT32_MAX;
#pragma unroll
    for (int k = 0; k < Words<S>::kCount; ++k) {
      const uint64_t word = words_[k * kBundle];
      w.word[k] = static_cast<uint32_t>(word);
      tiles = min(tiles, static_cast<int>(word >> 32));
    }
    return {internal::bit_cast<S>(w), tiles};
  }

 private:
  volatile uint64_t* words_;
};

// Carries a bundle through the batch of `count` tiles from `first` on, whose first place is
// `place`, once they are due: as far as tiles have sent something, or if it is to `stay`, to the
// end.
template <int kBatch, class S>
__device__ __forceinline__ void carry_batch(Packet<S>* place, Baton<S> baton, int first, int count,
                                            bool stay) {
  constexpr unsigned kAll = 0xffffffffu;
  int ready = 0;
  do {
    // All at once: a look takes as long as one answer.
    Packet<S> packets[kBatch];
    if (count == kBatch) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) packets[j] = receive(place + j * kBundle);
    } else {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        packets[j] = Packet<S>::tagged(Sent::kNothing, S(0));
        if (j < count) packets[j] = receive(place + j * kBundle);
      }
    }
    bool maps = true;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) maps = maps & packets[j].is_map();
    maps = __all_sync(kAll, maps);
    typename Baton<S>::State entering;
    bool due;
    do {
      entering = baton.look();
      due = __all_sync(kAll, entering.tiles >= first);
    } while (maps && !due);
    if (!due) continue;

    // The usual case is worth a straight line: all have sent maps, and no state is too large.
    S states[kBatch];
    if (maps) {
      Real<S> sum(0);  // of magnitudes; it keeps a NaN
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const S before = j == 0 ? entering.s : states[j - 1];
        sum = sum + magnitude(before);
        states[j] = apply(packets[j].map(), before);
      }
      if (__all_sync(kAll, sum <= Bounds<Real<S>>::state)) {
        baton.pass(states[kBatch - 1], first + kBatch);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          send(place + j * kBundle, Packet<S>::tagged(Sent::kState, states[j]));
        }
        return;
      }
    }

    // Otherwise as far as all lanes have states, or maps and states to which these can be applied.
    // Where a state is too large for a map, the block walks its tile, and sends what comes out.
    bool good = true;
    int mine = 0;
    S leaving = entering.s;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const bool map = packets[j].is_map();
      good = good & (map ? state_within(leaving) : packets[j].is(Sent::kState));
      leaving = map ? apply(packets[j].map(), leaving) : packets[j].state();
      states[j] = leaving;
      mine += good ? 1 : 0;
    }
    const int before = ready;
    ready = least_of_warp(mine);
    if (ready > before) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j < ready) leaving = states[j];
      }
      baton.pass(leaving, first + ready);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j < ready && packets[j].is_map()) {
          send(place + j * kBundle, Packet<S>::tagged(Sent::kState, states[j]));
        }
      }
    }
  } while (stay && ready < count);
}

// The work of the `block`-th of `blocks` of the chain: its teams of `team` warps carry their
// bundles' states from the first tile, which `init(channel)` enters, to the last. Teams with
// several bundles look after them by turns; they are of one warp (see plan_chain). `memory`: a
// Baton for each bundle of the block. If they are not 0, kWarps: of a block, in place of all that
// it has, and kTiles: of a batch. `in_order`: of so many bundles in a row, if it is not 0, maps
// come bundle by bundle, so that it is no use to look for a tile's where the last bundle's have not
// come.
template <int kWarps = 0, int kTiles = 0, class S, class F>
__device__ void carry_states(const Mail<S>& mail, int team, int block, int blocks, char* memory,
                             F&& init, int in_order = 0) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int teams = (kWarps > 0 ? kWarps : blockDim.x / 32) / team, member = warp % team;
  const int bundles = static_cast<int>((mail.channels + kBundle - 1) / kBundle);
  const int begin = block * teams + warp / team, step = blocks * teams;
  const int turns = (bundles - begin + step - 1) / step;
  const int end = static_cast<int>(mail.tiles) - 1;
  // What fills up a bundle does as its last channel does.
  const auto channel_of = [&](int k) {
    return min(static_cast<uint32_t>((begin + k * step) * kBundle + lane), mail.channels - 1);
  };
  const auto baton_of = [&](int k) { return Baton<S>(memory, k * teams + warp / team); };
  if (member == 0) {
    for (int k = 0; k < turns; ++k) baton_of(k).pass(init(channel_of(k)), 0);
  }
  __syncthreads();

  const auto carry = [&](auto size) {
    constexpr int kBatch = size.value;
    int through = 0;  // bundles in order that are at the end
    for (bool busy = turns > 0; busy;) {
      busy = false;
      int last = -1, row = 0;  // where the last bundle is that is not at the end
      for (int k = through; k < turns; ++k) {
        const Baton<S> baton = baton_of(k);
        const int behind = __shfl_sync(0xffffffffu, baton.look().tiles, 0);
        if (in_order > 0) {
          if (k == through && behind == end) ++through;
          const int its_row = (begin + k * step) / in_order;
          if (its_row == row && behind == last) continue;
          row = its_row;
        }
        // The next batch whose number fits this member's.
        const int number = behind / kBatch + ((member - behind / kBatch) & (team - 1));
        const int first = number * kBatch;
        if (behind == end || first >= end) continue;
        busy = true;
        carry_batch<kBatch>(mail.at(first, channel_of(k)), baton, first, min(kBatch, end - first),
                            turns == 1);
        if (in_order > 0) last = __shfl_sync(0xffffffffu, baton.look().tiles, 0);
      }
    }
  };
  // A single bundle has the most tiles to carry. Batches of 4 and 8, of the limit, in float32: 0.36
  // 0.46 and 0.40 0.48 at (1,262144,16), but 0.78 0.79 and 0.75 0.77 at (1,1048576,64).
  if constexpr (kTiles > 0) {
    carry(std::integral_constant<int, kTiles>{});
  } else if (bundles == 1) {
    carry(std::integral_constant<int, 32 / sizeof(S)>{});
  } else {
    carry(std::integral_constant<int, 16 / sizeof(S)>{});
  }
}

}  // namespace jax_scan
