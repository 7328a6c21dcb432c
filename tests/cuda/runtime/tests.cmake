# Included by tests/CMakeLists.txt after doubles/tests.cmake.
#
# The device "cuda" on the doubles of the CUDA runtime and cuBLAS (doubles/tests.cmake); and once more in
# another order of what streams may do, with memory that only queued work may touch, and experts multiplied
# one by one.
if(TARGET moesim_doubles_cuda)
  add_library(moesim_device_cuda STATIC)
  foreach(part device_cuda gemm launch memory module staging)
    target_sources(moesim_device_cuda PRIVATE ${CMAKE_SOURCE_DIR}/runtime/cuda/${part}.c)
  endforeach()
  target_link_libraries(moesim_device_cuda PUBLIC moesim_doubles_cuda moesim_kernels_on_host moesim_runtime)
  add_executable(test_device_cuda cuda/runtime/test_device_cuda.c)
  target_link_libraries(test_device_cuda PRIVATE moesim_device_cuda PkgConfig::CMOCKA m)
  add_test(NAME device_cuda COMMAND test_device_cuda)
  set_tests_properties(device_cuda PROPERTIES LABELS cuda)
  if(NOT MOESIM_SANITIZE) # the other ways, a minute later
    add_test(NAME device_cuda_otherwise COMMAND test_device_cuda)
    set_tests_properties(device_cuda_otherwise PROPERTIES LABELS cuda
      ENVIRONMENT "MOE_DOUBLE_SEED=2;MOE_DOUBLE_PROTECT=1;MOESIM_GROUPED=loop")
  endif()
endif()
