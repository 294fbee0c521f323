// Entry of the core's unit tests; each noun of the core has its own file beside this one.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
