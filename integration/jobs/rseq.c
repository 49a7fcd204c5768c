/* rseq.c: a thread that never leaves a restartable sequence (rseq(2)), and one that counts how often it was begun again. */
#include <pthread.h>
#include <stdio.h>
#include <sys/rseq.h>
#include <unistd.h>

static volatile unsigned long begun;

static void *in_sequence(void *unused)
{
	char *area = (char *)__builtin_thread_pointer() + __rseq_offset;
	/* The kernel goes to 4 when it sees the thread elsewhere than between 1 and 2. The signature is before 4. */
	asm volatile(".pushsection .data.rseq, \"aw\"\n.balign 32\n3: .long 0, 0\n.quad 1f, 2f - 1f, 4f\n.popsection\n"
		     "5: leaq 3b(%%rip), %%rax\nmovq %%rax, 8(%0)\n1: jmp 1b\n2:\n"
		     ".pushsection .text.rseq, \"ax\"\n.long 0x53053053\n4: lock incq %1\njmp 5b\n.popsection\n"
		     : : "r"(area), "m"(begun) : "rax", "memory");
	return unused;
}

int main(void)
{
	pthread_t thread;
	unsigned long last = 0, n = 0;
	pthread_create(&thread, NULL, in_sequence, NULL);
	for (;;) {
		usleep(20000);
		if (begun != last) {
			last = begun;
			printf("n %lu\n", ++n);
			fflush(stdout);
		}
	}
}
