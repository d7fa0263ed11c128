// Asynchronous copies from global to shared memory; plain ones before sm_80.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_scan {

template <int kBytes>
struct alignas(kBytes) Piece {
  char bytes[kBytes];
};

// 16-byte copies pass by the L1 cache.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes)
                 : "memory");
  }
#else
  *static_cast<Piece<kBytes>*>(shared) = *static_cast<const Piece<kBytes>*>(global);
#endif
}

// Zeros where `inside` does not hold; `global` is not read then. Pieces of less than 4 bytes are
// not copied asynchronously.
template <int kBytes>
__device__ __forceinline__ void copy_async_or_zero(void* shared, const void* global, bool inside) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes < 4) {
    *static_cast<Piece<kBytes>*>(shared) =
        inside ? *static_cast<const Piece<kBytes>*>(global) : Piece<kBytes>{};
    return;
  }
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = inside ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
                 : "memory");
  } else if constexpr (kBytes >= 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global),
                 "n"(kBytes), "r"(bytes)
                 : "memory");
  }
#else
  *static_cast<Piece<kBytes>*>(shared) =
      inside ? *static_cast<const Piece<kBytes>*>(global) : Piece<kBytes>{};
#endif
}

// All copies of this thread have arrived.
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace jax_scan
