// A test is a plain program: CHECK prints what failed and makes the process exit with 1.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                  \
        }                                                                                  \
    } while (false)

#define CHECK_THROWS(expression, wanted)                                                    \
    do {                                                                                    \
        bool thrown = false;                                                                \
        try {                                                                               \
            (void)(expression);                                                             \
        } catch (const ::poolweave::Error& error) {                                         \
            thrown = error.code() == (wanted);                                              \
        }                                                                                   \
        if (!thrown) {                                                                      \
            std::fprintf(stderr, "%s:%d: %s did not throw %s\n", __FILE__, __LINE__, #expression, #wanted); \
            std::exit(1);                                                                   \
        }                                                                                   \
    } while (false)
