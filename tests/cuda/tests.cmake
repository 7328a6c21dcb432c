# Included by tests/CMakeLists.txt: the .cu sources and the runtime that uses them, without a GPU: kernels
# compiled for the host (on_host.h).
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  message(STATUS "tests: no C++ compiler, the kernels for GPUs are not run on the host")
  return()
endif()
enable_language(CXX)

file(GLOB CUDA_KERNELS CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels/*.cu)
set_source_files_properties(${CUDA_KERNELS} PROPERTIES LANGUAGE CXX)
add_library(moesim_kernels_on_host STATIC ${CUDA_KERNELS} doubles/on_host.cc)
set_target_properties(moesim_kernels_on_host PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_compile_features(moesim_kernels_on_host PUBLIC cxx_std_17)
target_include_directories(moesim_kernels_on_host PRIVATE ${CMAKE_SOURCE_DIR})
target_compile_options(moesim_kernels_on_host PRIVATE -Wall -Wextra -Wshadow -ffp-contract=off
  -include ${CMAKE_SOURCE_DIR}/tests/doubles/on_host.h)
if(MOESIM_SANITIZE)
  target_compile_options(moesim_kernels_on_host PRIVATE -fsanitize=${MOESIM_SANITIZE}
    -fno-omit-frame-pointer -fno-sanitize-recover=all)
endif()
if(MOESIM_SANITIZE STREQUAL thread) # threads of a block are threads: it sees their races
  target_compile_definitions(moesim_kernels_on_host PRIVATE MOE_ON_HOST_THREADS)
endif()

file(GLOB CUDA_TESTS CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/test_*.c)
foreach(source ${CUDA_TESTS})
  get_filename_component(name ${source} NAME_WE)
  string(REPLACE test_ test_cuda_ name ${name})
  add_executable(${name} ${source} cuda/fixture_host.c)
  target_link_libraries(${name} PRIVATE moesim_kernels_on_host moesim_runtime PkgConfig::CMOCKA m)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS cuda)
endforeach()
target_link_libraries(test_cuda_combine PRIVATE moesim_combine) # what bf16 is compared with

# How near to the memory's limit kernels are: a GPU says (gpu.cmake); here, that it runs.
add_executable(bench_cuda_kernels bench/cuda_kernels.c cuda/fixture_host.c)
target_link_libraries(bench_cuda_kernels PRIVATE moesim_kernels_on_host moesim_runtime PkgConfig::CMOCKA m)
if(NOT MOESIM_SANITIZE STREQUAL thread)
  add_test(NAME bench_cuda_kernels COMMAND bench_cuda_kernels --tokens 8 --hidden 64 --experts 8 --top-k 2
    --ffn 32 --runs 1)
  set_tests_properties(bench_cuda_kernels PROPERTIES LABELS cuda)
endif()
