/* Ends the process by SIGKILL just before the n-th call that would change a file: preloaded, armed by kill_at(n). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

static long armed_at, calls;

void kill_at(long n) { calls = 0; armed_at = n; }

static void count(void) {
    if (armed_at && ++calls == armed_at) kill(getpid(), SIGKILL);
}

static int changes(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT); }

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MODE(last) va_list rest; va_start(rest, last); mode_t mode = va_arg(rest, mode_t); va_end(rest)

int open(const char *path, int flags, ...) { MODE(flags); if (changes(flags)) count(); return NEXT(open)(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags); if (changes(flags)) count(); return NEXT(open64)(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags); if (changes(flags)) count(); return NEXT(openat)(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags); if (changes(flags)) count(); return NEXT(openat64)(at, path, flags, mode); }
ssize_t write(int file, const void *data, size_t size) { count(); return NEXT(write)(file, data, size); }
int fsync(int file) { count(); return NEXT(fsync)(file); }
int rename(const char *from, const char *to) { count(); return NEXT(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) { count(); return NEXT(renameat)(a, from, b, to); }
int mkdir(const char *path, mode_t mode) { count(); return NEXT(mkdir)(path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { count(); return NEXT(mkdirat)(at, path, mode); }
int unlink(const char *path) { count(); return NEXT(unlink)(path); }
int unlinkat(int at, const char *path, int flags) { count(); return NEXT(unlinkat)(at, path, flags); }
int rmdir(const char *path) { count(); return NEXT(rmdir)(path); }
