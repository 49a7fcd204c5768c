// Preloaded, writes what libcuda asks of the kernel module's resource manager to the file $DRIVER_CALLS: objects that it makes
// and frees, and its control calls with the first 64 bytes of their parameters. Shows what a restore of the driver says again
// and what it does not.
//
//   cc -shared -fPIC -o driver_calls.so driver_calls.c && DRIVER_CALLS=calls LD_PRELOAD=$PWD/driver_calls.so PROGRAM
//
// Layouts: nvos.h and nv_escape.h of NVIDIA's open kernel modules.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct control {
  uint32_t client, object, command, flags;
  uint64_t params;
  uint32_t size, status;
};

int ioctl(int fd, unsigned long request, ...) {
  static int (*next)(int, unsigned long, ...);
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static FILE *out;
  va_list list;
  va_start(list, request);
  void *argument = va_arg(list, void *);
  va_end(list);
  if (!next) next = dlsym(RTLD_NEXT, "ioctl");
  int result = next(fd, request, argument);
  if ((request >> 8 & 0xff) != 'F' || !argument || !getenv("DRIVER_CALLS")) return result;
  pthread_mutex_lock(&lock);
  if (!out && (out = fopen(getenv("DRIVER_CALLS"), "a"))) setvbuf(out, NULL, _IOLBF, 0);
  uint32_t *words = argument;
  switch (out ? request & 0xff : 0) {
    case 0x29: fprintf(out, "free client %08x object %08x\n", words[0], words[2]); break;
    case 0x2b: fprintf(out, "make client %08x parent %08x object %08x class %04x\n", words[0], words[1], words[2], words[3]); break;
    case 0x2a: {
      struct control *call = argument;
      const unsigned char *params = (const unsigned char *)(uintptr_t)call->params;
      fprintf(out, "call client %08x object %08x command %08x status %x size %u", call->client, call->object, call->command,
              call->status, call->size);
      for (uint32_t at = 0; params && at < call->size && at < 64; at++) fprintf(out, "%s%02x", at % 4 ? "" : " ", params[at]);
      fputc('\n', out);
    }
  }
  pthread_mutex_unlock(&lock);
  return result;
}
