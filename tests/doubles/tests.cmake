# Included by tests/CMakeLists.txt after cuda/tests.cmake: the doubles of the CUDA runtime and of cuBLAS,
# against the toolkit's headers; neither its libraries nor a GPU are needed.
find_path(CUDA_HEADERS cuda_runtime_api.h
  HINTS ${CUDAToolkit_INCLUDE_DIRS} ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES include)
find_path(CUBLAS_HEADERS cublas_v2.h HINTS ${CUDA_HEADERS})
if(NOT CUDA_HEADERS OR NOT CUBLAS_HEADERS OR NOT TARGET moesim_kernels_on_host)
  message(STATUS "tests: no headers of CUDA and cuBLAS or no C++ compiler, their doubles are left out")
  return()
endif()

file(GLOB CUDA_DOUBLES CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/doubles/cu*.c)
add_library(moesim_doubles_cuda STATIC ${CUDA_DOUBLES})
set_target_properties(moesim_doubles_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_include_directories(moesim_doubles_cuda SYSTEM PUBLIC ${CUDA_HEADERS} ${CUBLAS_HEADERS})
target_link_libraries(moesim_doubles_cuda PUBLIC moesim_flags PRIVATE ${OPENBLAS_LIBRARY} INTERFACE
  $<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:moesim_base>) # a module has it from its program

foreach(name test_cuda_double test_cuda_misuse test_cublas_double)
  add_executable(${name} doubles/${name}.c)
  target_link_libraries(${name} PRIVATE moesim_kernels_on_host moesim_doubles_cuda moesim_base
    ${OPENBLAS_LIBRARY} PkgConfig::CMOCKA m)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS cuda)
endforeach()
