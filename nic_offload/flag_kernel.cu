/*
 * The kernels that store to flag words and doorbells from a GPU stream: one 64-bit store per thread.
 *
 * A flag word is host memory mapped for the GPU, which the agent polls: `st.release.sys`, so that any thread that
 * acquires the value sees all that the stream did before the kernel. A doorbell is a NIC's register: memory-mapped I/O,
 * for which PTX has `st.mmio.relaxed.sys`, done exactly once and never merged, torn or speculated; as it orders
 * nothing, a fence of the whole system comes before it. A volatile store promises neither.
 *
 * What always holds: each thread stores its word once, and orders its own stores, because a barrier orders threads, not
 * what other devices see.
 *
 * What they don't do: read a word outside the GPU's own memory. `totals` lie in it; only these kernels touch them, in
 * stream order, so they need no atomics.
 */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error "release and mmio stores need a GPU of compute capability 7.0 or later"
#endif

static __device__ void release(unsigned long long *word, unsigned long long value)
{
	asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(value) : "memory");
}

extern "C" __global__ void tk_ring(unsigned long long *words, unsigned long long value)
{
	release(words + threadIdx.x, value);
}

/* For graphs, whose arguments are frozen when they are captured: each replay adds to the totals itself. */
extern "C" __global__ void tk_ring_next(unsigned long long *words, unsigned long long *totals, unsigned long long step)
{
	unsigned long long total = totals[threadIdx.x] + step;

	totals[threadIdx.x] = total;
	release(words + threadIdx.x, total);
}

/* st.mmio requires PTX 8.2, which is CUDA 12.2; an older compiler makes no kernel for doorbells. */
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 2)
extern "C" __global__ void tk_ring_doorbell(unsigned long long *doorbell, unsigned long long step)
{
	asm volatile("fence.acq_rel.sys;" ::: "memory");
	asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(doorbell)), "l"(step)
		     : "memory");
}
#endif
