/*
 * The kernels that ring flag words from a GPU stream: fence the system, then store one 64-bit word a thread.
 *
 * A word is host memory mapped for the GPU, which the agent polls ("set": what is stored is the running total),
 * or a doorbell of the NIC, which adds what is stored to its counter ("add": what is stored is the increment).
 * Which of the two it is only the caller knows; the store is the same.
 *
 * What always holds: the fence comes before the store, so whoever sees the new value, on whatever device, sees
 * all that the stream wrote before the kernel. A store is one volatile 64-bit access of the word: never torn,
 * merged or left out. That is a relaxed store of system scope, and a release together with the fence. Each
 * thread fences for itself: a barrier would order threads, not what other devices see.
 *
 * What they don't do: read a word that is not in the GPU's own memory. `totals` are; they are touched by the
 * kernels alone, in stream order, so that they need no atomics.
 */

extern "C" __global__ void tk_ring(unsigned long long *words, unsigned long long value)
{
	__threadfence_system();
	*(volatile unsigned long long *)(words + threadIdx.x) = value;
}

/* For graphs, whose arguments are frozen when they are captured: each replay counts on by itself. */
extern "C" __global__ void tk_ring_next(unsigned long long *words, unsigned long long *totals, unsigned long long step)
{
	unsigned long long total = totals[threadIdx.x] + step;

	totals[threadIdx.x] = total;
	__threadfence_system();
	*(volatile unsigned long long *)(words + threadIdx.x) = total;
}
