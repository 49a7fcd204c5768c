// Runs kernels on request, to see who waits for whom on a GPU.
//
//   spin FOLDER    does what the files FOLDER/0, FOLDER/1, ... say, one after another, and prints a line for each:
//     spin MS        a kernel of one thread that runs for so long: "spun SECONDS ERROR"
//     work           from now on small kernels, one after another, on a thread of its own: "works"
//     longest        the longest of these since the last time: "longest SECONDS, N kernels"
//     assert         a kernel whose assertion fails: "asserted ERROR"
#include <atomic>
#include <cassert>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include <cuda_runtime.h>

using Clock = std::chrono::steady_clock;

static double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

__global__ void spin(unsigned long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

__global__ void add(unsigned *x) { x[threadIdx.x] += 1; }

__global__ void fail(int one) { assert(one == 2); }

static std::atomic<double> longest{0};
static std::atomic<long> kernels{0};

static void work(unsigned *memory) {
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  for (;;) {
    Clock::time_point begin = Clock::now();
    add<<<1, 32, 0, stream>>>(memory);
    if (cudaError_t error = cudaStreamSynchronize(stream)) {
      printf("work ended: %s\n", cudaGetErrorName(error));
      return;
    }
    if (since(begin) > longest) longest = since(begin);
    kernels++;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

int main(int, char **argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  unsigned *memory;
  cudaMalloc(&memory, 4096);
  add<<<1, 32>>>(memory);
  cudaDeviceSynchronize();
  puts("ready");
  for (int number = 0;;) {
    char word[16] = "";
    int ms = 0;
    FILE *file = fopen((std::string(argv[1]) + "/" + std::to_string(number)).c_str(), "r");
    if (!file) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      continue;
    }
    int read = fscanf(file, "%15s %d", word, &ms);
    fclose(file);
    number++;
    if (read > 1 && !strcmp(word, "spin")) {
      Clock::time_point begin = Clock::now();
      spin<<<1, 1>>>(ms * 1000000ull);
      cudaError_t error = cudaDeviceSynchronize();
      printf("spun %.3f %s\n", since(begin), cudaGetErrorName(error));
    } else if (!strcmp(word, "work")) {
      std::thread(work, memory).detach();
      puts("works");
    } else if (!strcmp(word, "longest")) {
      printf("longest %.3f, %ld kernels\n", longest.exchange(0), kernels.exchange(0));
    } else if (!strcmp(word, "assert")) {
      fail<<<1, 1>>>(1);
      printf("asserted %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    }
  }
}
