module @jit_variadic attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["d"=8]> {stablehlo.mesh = {axes = [{name = "d", size = 8 : i64}]}}
  sdy.mesh @mesh_0 = <["d"=8]> {stablehlo.mesh = {axes = [{name = "d", size = 8 : i64}]}}
  func.func public @main(%arg0: tensor<8x100xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"d"}, {}]>}, %arg1: tensor<8x3x5xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"d"}, {}, {}]>}, %arg2: tensor<8x7xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"d"}, {}]>}) -> (tensor<1x100xf32> {jax.result_info = "result[0]"}, tensor<1x3x5xf32> {jax.result_info = "result[1]"}, tensor<1x7xi32> {jax.result_info = "result[2]"}) {
    %0:3 = sdy.manual_computation(%arg0, %arg1, %arg2) in_shardings=[<@mesh, [{"d"}, {}]>, <@mesh, [{"d"}, {}, {}]>, <@mesh, [{"d"}, {}]>] out_shardings=[<@mesh, [{}, {}]>, <@mesh, [{}, {}, {}]>, <@mesh, [{}, {}]>] manual_axes={"d"} (%arg3: tensor<1x100xf32>, %arg4: tensor<1x3x5xf32>, %arg5: tensor<1x7xi32>) {
      %1 = "stablehlo.all_reduce"(%arg3) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "d">]>, use_global_device_ids}> ({
      ^bb0(%arg6: tensor<f32>, %arg7: tensor<f32>):
        %4 = stablehlo.add %arg6, %arg7 : tensor<f32>
        stablehlo.return %4 : tensor<f32>
      }) : (tensor<1x100xf32>) -> tensor<1x100xf32>
      %2 = "stablehlo.all_reduce"(%arg4) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "d">]>, use_global_device_ids}> ({
      ^bb0(%arg6: tensor<f32>, %arg7: tensor<f32>):
        %4 = stablehlo.add %arg6, %arg7 : tensor<f32>
        stablehlo.return %4 : tensor<f32>
      }) : (tensor<1x3x5xf32>) -> tensor<1x3x5xf32>
      %3 = "stablehlo.all_reduce"(%arg5) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<name = "d">]>, use_global_device_ids}> ({
      ^bb0(%arg6: tensor<i32>, %arg7: tensor<i32>):
        %4 = stablehlo.add %arg6, %arg7 : tensor<i32>
        stablehlo.return %4 : tensor<i32>
      }) : (tensor<1x7xi32>) -> tensor<1x7xi32>
      sdy.return %1, %2, %3 : tensor<1x100xf32>, tensor<1x3x5xf32>, tensor<1x7xi32>
    } : (tensor<8x100xf32>, tensor<8x3x5xf32>, tensor<8x7xi32>) -> (tensor<1x100xf32>, tensor<1x3x5xf32>, tensor<1x7xi32>)
    return %0#0, %0#1, %0#2 : tensor<1x100xf32>, tensor<1x3x5xf32>, tensor<1x7xi32>
  }
}
