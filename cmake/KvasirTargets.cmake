# Helpers that keep every room's CMakeLists.txt to a few lines.

option(KVASIR_WERROR "Treat warnings as errors" ON)
set(KVASIR_SANITIZE "" CACHE STRING "Sanitizers for every target, e.g. address;undefined")
option(KVASIR_FUZZ "Build libFuzzer targets (needs clang)" OFF)

add_library(kvasir_flags INTERFACE)
target_compile_options(kvasir_flags INTERFACE
  -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wold-style-cast -Wconversion -Wno-sign-conversion
  $<$<BOOL:${KVASIR_WERROR}>:-Werror>
  $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>)  # the locks that src/base/mutex.h names
if(KVASIR_SANITIZE)
  list(JOIN KVASIR_SANITIZE "," _san)
  target_compile_options(kvasir_flags INTERFACE -fsanitize=${_san} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(kvasir_flags INTERFACE -fsanitize=${_san})
endif()
# How many times as long tests wait before they call something stuck: the sanitizers' programs are that much slower.
set(KVASIR_TEST_PATIENCE 1)
if(KVASIR_SANITIZE)
  set(KVASIR_TEST_PATIENCE 5)
endif()
if(KVASIR_FUZZ)
  target_compile_options(kvasir_flags INTERFACE -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
  target_link_options(kvasir_flags INTERFACE -fsanitize=address,undefined)
endif()

# kvasir_rooms(DIR…): add each folder that has a CMakeLists.txt.
function(kvasir_rooms)
  foreach(dir ${ARGN})
    if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${dir}/CMakeLists.txt)
      add_subdirectory(${dir})
    endif()
  endforeach()
endfunction()

# kvasir_library(NAME SOURCES… LIBS…): a static library `kvasir_NAME`, included as "NAME/…".
function(kvasir_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  add_library(kvasir_${name} STATIC ${arg_SOURCES})
  target_include_directories(kvasir_${name} PUBLIC ${CMAKE_SOURCE_DIR}/src)
  target_link_libraries(kvasir_${name} PUBLIC ${arg_LIBS} PRIVATE $<BUILD_INTERFACE:kvasir_flags>)
endfunction()

# kvasir_test(NAME SOURCES… LIBS… [TIMEOUT s] [LABELS…]): one GoogleTest program, one ctest entry.
function(kvasir_test name)
  if(NOT BUILD_TESTING)
    return()
  endif()
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;LIBS;LABELS" ${ARGN})
  find_package(GTest REQUIRED)
  add_executable(${name} ${arg_SOURCES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/test-bin)
  target_link_libraries(${name} PRIVATE ${arg_LIBS} GTest::gmock GTest::gtest_main kvasir_flags)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  kvasir_test_settings(${name} TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}")
endfunction()

# kvasir_test_settings(NAME TIMEOUT s [LABELS…] [ENVIRONMENT…]): for every entry of ctest.
function(kvasir_test_settings name)
  cmake_parse_arguments(arg "" "TIMEOUT" "LABELS;ENVIRONMENT" ${ARGN})
  math(EXPR _timeout "${arg_TIMEOUT} * ${KVASIR_TEST_PATIENCE}")
  set_tests_properties(${name} PROPERTIES TIMEOUT ${_timeout} LABELS "${arg_LABELS}"
    ENVIRONMENT "KVASIR_SOURCE_DIR=${CMAKE_SOURCE_DIR};KVASIR_BUILD_DIR=${CMAKE_BINARY_DIR};KVASIR_TEST_PATIENCE=${KVASIR_TEST_PATIENCE};${arg_ENVIRONMENT}")
  if("thread" IN_LIST KVASIR_SANITIZE)
    set_property(TEST ${name} APPEND PROPERTY ENVIRONMENT "TSAN_OPTIONS=suppressions='${CMAKE_SOURCE_DIR}/test/sanitizers/tsan.supp'")
  endif()
endfunction()

# kvasir_fuzz(NAME SOURCE LIBS…): with clang a libFuzzer program; with GCC a replay of its
# corpus (fuzz/corpus/NAME) that runs as an ordinary test. The target named canary has a bug,
# and its test fails if that is not found.
function(kvasir_fuzz name source)
  add_executable(fuzz_${name} ${source})
  if(NOT TARGET kvasir_fuzzers)
    add_custom_target(kvasir_fuzzers)
  endif()
  add_dependencies(kvasir_fuzzers fuzz_${name})
  set_target_properties(fuzz_${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fuzz-bin)
  target_link_libraries(fuzz_${name} PRIVATE ${ARGN} kvasir_flags)
  if(KVASIR_FUZZ)
    target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  else()
    target_sources(fuzz_${name} PRIVATE ${CMAKE_SOURCE_DIR}/fuzz/replay_main.cc)
    if(BUILD_TESTING)
      set(_replay "$<TARGET_FILE:fuzz_${name}>" ${CMAKE_SOURCE_DIR}/fuzz/corpus/${name})
      if(name STREQUAL "canary")
        set(_replay sh -c "! \"$@\"" sh ${_replay})
      endif()
      add_test(NAME fuzz_replay_${name} COMMAND ${_replay})
      kvasir_test_settings(fuzz_replay_${name} TIMEOUT 60)
    endif()
  endif()
endfunction()

# kvasir_system_test(NAME [TIMEOUT s] [LABELS…] [LONG]): test/NAME.py, one ctest entry. Real processes
# take the machine for themselves: two at once would only time each other. LONG: a second entry, label
# `long`, with KVASIR_LONG=1, which runs the cases that take minutes.
function(kvasir_system_test name)
  if(NOT BUILD_TESTING)
    return()
  endif()
  cmake_parse_arguments(arg "LONG" "TIMEOUT" "LABELS" ${ARGN})
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()
  add_test(NAME system_${name} COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/${name}.py)
  kvasir_test_settings(system_${name} TIMEOUT ${arg_TIMEOUT} LABELS system ${arg_LABELS})
  set_tests_properties(system_${name} PROPERTIES PROCESSORS 2 RESOURCE_LOCK machine)
  if(arg_LONG)
    add_test(NAME system_${name}_long COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/${name}.py)
    kvasir_test_settings(system_${name}_long TIMEOUT 3600 LABELS system long ENVIRONMENT KVASIR_LONG=1)
    set_tests_properties(system_${name}_long PROPERTIES PROCESSORS 2 RESOURCE_LOCK machine)
  endif()
endfunction()
