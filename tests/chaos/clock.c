/* LD_PRELOAD of the processes of one run: the system's clock as the file in CHAOS_CLOCK says, which
   holds the seconds by which it is wrong (a double). Absolute waits on that clock are put right, as
   the kernel knows nothing of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double *offset;

__attribute__((constructor)) static void open_offset(void) {
  const char *path = getenv("CHAOS_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *page = mmap(0, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
  if (page != MAP_FAILED) offset = page;
  close(file);
}

static void add(struct timespec *at, double seconds) {
  at->tv_sec += (time_t)seconds;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*next)(clockid_t, struct timespec *);
  if (!next) next = NEXT(clock_gettime);
  int result = next(clock, now);
  if (!result && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    add(now, *offset);
  return result;
}

time_t time(time_t *into) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (into) *into = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

/* A deadline of this clock has many seconds; one of the monotonic clock few. */
static struct timespec true_time(const struct timespec *until) {
  struct timespec at = *until;
  if (offset && at.tv_sec > 1000000000) add(&at, -*offset);
  return at;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  struct timespec at = true_time(until);
  return NEXT(pthread_cond_timedwait)(cond, mutex, &at);
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           clockid_t clock, const struct timespec *restrict until) {
  struct timespec at = true_time(until);
  return NEXT(pthread_cond_clockwait)(cond, mutex, clock, &at);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
  struct timespec at = true_time(until);
  return NEXT(pthread_mutex_timedlock)(mutex, &at);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
  struct timespec at = true_time(until);
  return NEXT(sem_timedwait)(sem, &at);
}

int sem_clockwait(sem_t *restrict sem, clockid_t clock, const struct timespec *restrict until) {
  struct timespec at = true_time(until);
  return NEXT(sem_clockwait)(sem, clock, &at);
}
