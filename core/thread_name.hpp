// Names of the core's threads, as `top -H` and debuggers show them: at most 15 characters.
#pragma once

#include <pthread.h>

namespace kvstrata {

inline void name_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

}  // namespace kvstrata
