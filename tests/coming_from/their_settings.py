"""What users of the five systems could set for training and serving, and tests elsewhere that show our side of it."""

from __future__ import annotations

# Everything that the five systems let their users set; for Friesian's features see test_friesian_page.py.
THEIRS = {
    "deeprec": """
        --data_location --output_dir --checkpoint --seed --steps --batch_size --save_steps --keep_checkpoint_max
        --no_eval --deep_dropout --bf16 --tf --emb_fusion --op_fusion --smartstaged --optimizer --learning_rate
        --micro_batch --ev --ev_filter --ev_elimination --adaptive_emb --dynamic_ev --incremental_ckpt --workqueue
        --parquet_dataset --parquet_dataset_shuffle --group_embedding --protocol --inter --intra
        --input_layer_partitioner --dense_layer_partitioner --timeline --interaction_op
        START_STATISTIC_STEP STOP_STATISTIC_STEP MALLOC_CONF LD_PRELOAD TF_CONFIG MEM_USAGE_STRATEGY
        adam adamasync adagraddecay adagrad gradientdescent AdamWOptimizer
        get_embedding_variable categorical_column_with_embedding categorical_column_with_hash_bucket embedding_dim
        initializer default_value_dim default_value_no_permission CounterFilter(filter_freq) CBFFilter
        GlobalStepEvict(steps_to_live) L2WeightEvict(l2_weight_threshold) StorageOption get_multihash_variable
        total_count CheckpointOption TF_EV_SAVE_FILTERED_FEATURES
        save_checkpoint_secs save_incremental_checkpoint_secs incremental_save_restore
        savedmodel_dir save_incr_model checkpoint_dir initialize process get_serving_model_info signature_name
        model_store_type oss_* incremental_model.ckpt model.ckpt Rollback warmup_file_name SessionGroup session_num
        select_session_policy use_per_session_threads cpusets gpu_ids_list use_multi_stream enable_inline_execute
        omp_num_threads kmp_blocktime inter_op_parallelism_threads intra_op_parallelism_threads model_update_*
        feature_store_type redis_* read_thread_num update_thread_num lock_timeout ev_storage_* shard_embedding
        shard_instance_count embedding_names timeline_* init_timeout_minutes int8 bf16
    """,
    "e2eaiok": """
        RUN_MODE=kaggle RUN_MODE=criteo_small RUN_MODE=criteo_full run_aiokray_dlrm.sh run_data_check.sh
        run_prepare_env.sh run_data_process.sh convert_to_parquet.py preprocessing.py run_train.sh run_inference.sh
        DATASET_DIR OUTPUT_DIR APP_DIR http_proxy https_proxy no_proxy OMP_NUM_THREADS KMP_BLOCKTIME KMP_AFFINITY
        train_days train_input_folder test_input_folder output_folder spark_config
        arch_sparse_feature_size arch_dense_feature_size arch_embedding_size arch_mlp_bot arch_mlp_top
        arch_interaction_op arch_interaction_itself md_flag md_threshold md_temperature md_round_dims qr_flag
        qr_threshold qr_operation qr_collisions activation_function loss_function loss_weights loss_threshold
        round_targets max_ind_range sparse_dense_boundary
        mini_batch_size nepochs optimizer learning_rate lamblr lr_num_warmup_steps lr_decay_start_step
        lr_num_decay_steps bf16 use_ipex use_gpu test_freq test_mini_batch_size test_num_workers mlperf_auc_threshold
        mlperf_acc_threshold numpy_rand_seed num_batches sync_dense_params dist_backend num_workers
        data_generation data_set data_size num_indices_per_lookup num_indices_per_lookup_fixed data_trace_file
        data_trace_enable_padding raw_data_file processed_data_file train_data_path eval_data_path day_feature_count
        memory_map mlperf_bin_loader mlperf_bin_shuffle data_randomize data_sub_sample_rate print_freq print_time
        print_precision debug_mode plot_compute_graph enable_profiling profiling_start_iter profiling_num_iters out_dir
        save_model load_model inference_only save_onnx mlperf_logging best_auc.txt
        --distributed --nproc_per_node --nnodes --world_size --hostfile --master_addr --master_port --mpi_type --timeout
        --job_name --ncpu_per_proc --ccl_worker_count --ninstances --ncore_per_instance --socket_id --core_list
        --enable_tcmalloc --enable_jemalloc --use_default_allocator --enable_iomp --config-path --save-path
    """,
    "ray-notebook": """
        num_workers train_batch_size validation_batch_size limit_training_rows limit_validation_rows
        read_from_cached_parquet num_epochs skip_train_step train_day_list validate_every_n_steps skip_validation_step
        skip_validation_at_epoch_end log_metrics_every_n_steps train_step_limit embedding_dim
        num_embeddings_per_feature dense_arch_layer_sizes over_arch_layer_sizes interaction_type dcn_num_layers
        dcn_low_rank_dim learning_rate optimizer_eps seed start_from_checkpoint_path save_checkpoint_every_n_epochs
        save_checkpoint_every_n_mins save_checkpoint_at_end checkpoint_dir
        ScalingConfig FailureConfig(max_failures) CheckpointConfig(num_to_keep) RunConfig(storage_path)
        KINETO_USE_DAEMON KINETO_DAEMON_INIT_DELAY_S RAY_TRAIN_V2_ENABLED ray.train.report iteration_blocked_time
        get_ray_dataset read_csv(shuffle) fill_missing concat_and_normalize_dense_features map_features_to_indices
        read_feature_mapping_table convert_to_torchrec_batch_format TRAIN_DATASET_PATH VAL_DATASET_PATH
    """,
    "intel-wide-deep": """
        fp32_training.sh launch_benchmark.py fp32_training_demo.sh fp32_training_check_accuracy.sh
        run_tf_serving_client.py
        DATASET_DIR OUTPUT_DIR CHECKPOINT_DIR STEPS TARGET_ACCURACY RETRY_LIMIT MODEL_NAME MODEL_SCRIPT REGISTRY
        IMAGE_VERSION IMAGE_SUFFIX USER_ID USER_NAME GROUP_ID GROUP_NAME FS_ID NFS_PATH NFS_SERVER PVC_NAME PVC_PATH
        REPLICAS TF_SERVING_PORT
        SavedModel MODEL_BASE_PATH predict -s --server -d --data_file -b --batch_size -n --num_iteration
        -w --warm_up_iteration Accuracy Latency Throughput
        WIDE_AND_DEEP DEEP WIDE hash_bucket_size embedding_column(dimension) normalizer_fn dnn_hidden_units dnn_dropout
        linear_feature_columns linear_optimizer dnn_optimizer batch_size save_checkpoints_steps shuffle
        num_parallel_calls inter_op_parallelism_threads intra_op_parallelism_threads
    """,
    "friesian-serving": """
        recommender recommender-http recall feature ranking feature-init recall-init client deploy.sh envoy
        friesian-server-helm
        getRecommendIDs recommend/{id} ID recommendNum candidateNum canK IDProbList searchCandidates addItem
        getUserFeatures getItemFeatures doPredict getMetrics metrics resetMetrics getClientMetrics clientMetrics
        FAILED_PRECONDITION
        servicePort monitorPort serviceType redisUrl redisType redisSentinelMasterName redisSentinelMasterURL
        redisKeyPrefix redisClusterItemSlotType redisPoolMaxTotal redisTimeout userFeatureColumns itemFeatureColumns
        userModelPath itemModelPath modelPath savedModelInputs inferenceColumns inferenceBatch modelParallelism
        threadPerModel coreNumberPerMachine indexDim indexPath featureServiceURL recallServiceURL rankingServiceURL
        logInterval
        predict_2tower.py est.save user-model item-model twotower-model wnd_user.parquet wnd_item.parquet
        user_ebd.parquet item_ebd.parquet initialUserDataPath initialItemDataPath userIDColumn itemIDColumn
        initialDataPath itemEmbeddingColumn part HNSWlibInt16_32 efConstruction efSearch FlatL2 IVFFlat
        loadInitialData loadSavedIndex saveBuiltIndex getFeatureFromFeatureService
        RecommenderMultiThreadClient -target -dataDir -k -clientNum -testNum
        recommend.overall recommend.recall recommend.feature.user recommend.feature.item recommend.rankingInference
        feature.user.redis feature.item.redis indexing.faiss http_requests_total http_requests_latency_seconds
    """,
}

_OPTIMIZERS = "learner/test_optimizers.py"
_TABLE = "embeddings/test_table.py"
_TRAINING = "train/test_training.py"
_CHECKPOINT = "artifacts/test_checkpoint.py"
_GRPC = "serve/test_grpc.py"
_SERVER = "serve/test_server.py"
_SERVICE = "serve/test_service.py"
_REDIS = "feature_store/test_redis_store.py"
_LOAD = "feature_store/test_load.py"
_SPLIT = "serve/test_roles.py::test_split_roles_recommend_like_one_process"
_METRICS = "serve/test_telemetry.py::test_the_metrics_page_lists_exactly_what_is_exposed"
_MEASURED = "bench/test_serve_bundle.py::test_our_own_server_is_measured_through_both_transports"
_DAMAGED = f"{_CHECKPOINT}::test_a_flipped_byte_in_any_file_is_noticed_and_the_checkpoint_before_is_used"

_ON_RAY = "deploy/test_ray_target.py::test_the_jobs_prepare_and_train_on_nodes_started_as_they_say"
_WORKERS = (
    "launch/test_launch.py::test_a_run_goes_on_with_another_number_of_workers_and_ray_knows_its_checkpoints"
)
_KILLED = "launch/test_launch.py::test_a_killed_worker_costs_the_steps_since_the_last_checkpoint_and_no_more"
_TOO_OFTEN = "launch/test_launch.py::test_losing_workers_too_often_ends_the_run_and_says_how_to_go_on"
_SAME_DIGEST = "engines/test_engine_contract.py::test_digest_of_a_fixture_is_the_golden_one"

# A part of a row, or their name of a row, -> the test that shows what the page says about it.
SHOWN_BY = {
    "ranking.train.seed": f"{_TRAINING}::test_one_thread_gives_the_same_bits_twice",
    "ranking.train.max_steps": f"{_TRAINING}::test_training_stops_after_so_many_steps_or_minutes",
    "ranking.train.micro_batches": f"{_TRAINING}::test_micro_batches_change_nothing_but_rounding",
    "ranking.train.target": f"{_TRAINING}::test_training_stops_at_its_target",
    "ranking.train.schedule.warmup": f"{_OPTIMIZERS}::test_warm_up_hold_and_quadratic_decay",
    "ranking.train.schedule.decay_from": f"{_OPTIMIZERS}::test_warm_up_hold_and_quadratic_decay",
    "ranking.train.schedule.decay": f"{_OPTIMIZERS}::test_warm_up_hold_and_quadratic_decay",
    "ranking.train.schedule.power": f"{_OPTIMIZERS}::test_warm_up_hold_and_quadratic_decay",
    "rows": "features/test_row_operations.py::test_a_sample_keeps_the_same_rows_in_any_cutting",
    "check --data": "test_cli.py::test_check_looks_at_the_files",
    "generate --rows": "test_cli.py::test_generate_speaks_json",
    "prepare --data": "test_cli.py::test_prepare_says_what_was_read_and_written",
    "prepare --into": "test_cli.py::test_prepare_says_what_was_read_and_written",
    "prepare --explain": "test_cli.py::test_explain_shows_a_line_for_each_feature",
    "prepare --binary": "prepare/test_prepare_rows.py::test_binary_rows_are_160_bytes_of_label_counts_and_ids",
    "prepare --memory": "prepare/test_prepare_digest.py::test_counting_on_disk_equals_counting_in_memory",
    "prepare --workers": "prepare/test_prepare_digest.py::test_partitions_do_not_change_the_digest",
    "prepare --engine": _SAME_DIGEST,
    "prepare --address": "engines/test_ray.py::test_prepare_connects_to_an_address",
    "prepare --spark-conf": "engines/test_spark_cluster.py::test_settings_of_the_user_win",
    "train --engine": _ON_RAY,
    "train --address": _ON_RAY,
    "train --cpus-per-worker": _ON_RAY,
    "train --workers": _WORKERS,
    "train --data-workers": _KILLED,
    "train --max-failures": _TOO_OFTEN,
    "score --bundle": "score/test_scores.py::test_a_bundle_gives_the_scores_of_its_checkpoint",
    "score --embeddings": "score/test_sides.py::test_users_of_a_bundle_are_as_of_the_end_of_the_log",
    "--workqueue": "dataset/test_schedule.py::test_every_row_that_is_left_goes_to_one_rank_of_one_batch",
    "TF_CONFIG": "launch/test_train_flags.py::test_torchrun_s_processes_train_together",
    "sync_dense_params": "parallel/test_runs.py::test_losses_and_metrics_are_those_of_one_process",
    "RETRY_LIMIT": "deploy/test_pipeline.py::test_each_attempt_trains_for_as_long_again",
    "friesian-server-helm": "deploy/test_helm.py::test_what_the_chart_makes_is_what_a_cluster_takes",
    "--emb_fusion": "embeddings/test_collection.py::test_a_collection_equals_its_tables_one_by_one",
    "--group_embedding": "embeddings/test_collection.py::test_a_collection_equals_its_tables_one_by_one",
    "--adaptive_emb": f"{_TABLE}::test_a_waiting_key_trains_a_shared_row_and_starts_from_it",
    "adam": f"{_TABLE}::test_adam_counts_the_steps_of_the_row_not_of_the_run",
    "adagraddecay": f"{_TABLE}::test_adagrad_decay_applies_every_missed_period_down_to_the_floor",
    "initializer": f"{_TABLE}::test_rows_depend_on_seed_and_key_not_on_arrival",
    "default_value_no_permission": f"{_TABLE}::test_a_key_is_admitted_at_its_nth_sighting_and_reads_zeros_before",
    "CounterFilter(filter_freq)": f"{_TABLE}::test_reading_does_not_count_towards_admission",
    "CBFFilter": f"{_TABLE}::test_bloom_admission_is_never_late_and_rarely_early",
    "L2WeightEvict(l2_weight_threshold)": f"{_TABLE}::test_eviction_by_norm_compares_the_norm_itself",
    "StorageOption": "embeddings/test_disk.py::test_memory_stays_below_the_bound_and_answers_are_the_same",
    "CheckpointOption": f"{_CHECKPOINT}::test_a_plain_script_reads_it",
    "TF_EV_SAVE_FILTERED_FEATURES": f"{_CHECKPOINT}::test_a_full_checkpoint_and_five_deltas_restore_the_live_tables",
    "save_checkpoint_secs": f"{_TABLE}::test_a_snapshot_holds_its_moment_while_training_goes_on",
    "save_incremental_checkpoint_secs": f"{_TABLE}::test_a_delta_holds_only_what_changed",
    "incremental_save_restore": _DAMAGED,
    "num_embeddings_per_feature": f"{_TABLE}::test_a_key_out_of_range_is_an_error_that_names_it",
    "start_from_checkpoint_path": "train/test_resume.py::test_a_run_killed_again_and_again_gives_the_same_bits",
    "get_ray_dataset": "dataset/test_log_batches.py::test_criteo_rows_equal_those_of_the_table",
    "ray.train.report": "test_tracking.py::test_tensorboard_reads_back_what_was_logged",
    "arch_interaction_itself": "models/test_models.py::test_dot_interaction_is_the_strict_lower_triangle",
    "mlperf_logging": "test_tracking.py::test_mllog_uses_the_names_of_mlperf",
    "log.user": "export/test_export.py::test_users_have_the_clicks_of_the_whole_log",
    "log.item": "export/test_export.py::test_items_stand_in_the_order_of_their_clicks",
    "retrieval.hidden": "learner/test_graphs.py::test_graphs_give_the_vectors_of_the_towers",
    "serve --bundle": f"{_SERVER}::test_it_says_where_it_answers_and_ends_when_told",
    "serve --http-port": f"{_SERVER}::test_it_says_where_it_answers_and_ends_when_told",
    "serve --grpc-port": f"{_SERVER}::test_it_says_where_it_answers_and_ends_when_told",
    "serve --processes": f"{_SERVER}::test_several_processes_share_the_ports_and_one_that_ends_is_replaced",
    "serve --threads": "bundle/test_sessions.py::test_many_threads_may_run_one_graph",
    "serve --role": _SPLIT,
    "serve --recall-at": _SPLIT,
    "serve --features-at": _SPLIT,
    "serve --rank-at": _SPLIT,
    "envoy": "serve/test_roles.py::test_calls_go_to_all_addresses_in_turn",
    "serve --prefix": "serve/test_transports_agree.py::test_features_from_redis",
    "serve --features": f"{_LOAD}::test_a_loaded_store_answers_as_the_bundle_does",
    "serve --deadline-ms": "serve/test_recommender.py::test_little_time_gives_the_order_of_recall_and_says_so",
    "serve --otlp": "serve/test_telemetry.py::test_a_request_is_one_span_with_one_below_it_for_each_stage",
    "load --features": f"{_LOAD}::test_the_command_says_what_it_did_and_no_password",
    "load --side": f"{_LOAD}::test_raw_rows_of_parquet_go_through_the_plan",
    "load --parquet": f"{_LOAD}::test_raw_rows_of_parquet_go_through_the_plan",
    "load --rate": f"{_LOAD}::test_the_rate_is_kept",
    "redisType": f"{_REDIS}::test_an_address_reads_as_it_was_given",
    "redisTimeout": f"{_REDIS}::test_a_frozen_redis_takes_no_longer_than_the_deadline",
    "rollback --bundle": f"{_SERVICE}::test_rollback_serves_the_version_before_here_and_for_others",
    "model.ckpt": f"{_SERVICE}::test_a_damaged_version_is_refused_and_the_old_one_keeps_serving",
    "incremental_model.ckpt": "train/test_follow.py::test_served_scores_after_deltas_are_those_of_the_learner",
    "OUTPUT_DIR": "test_cli_export.py::test_what_did_not_pass_its_gate_is_not_published",
    "bench serve --address": _MEASURED,
    "bench serve --candidates": _MEASURED,
    "bench serve --seconds": _MEASURED,
    "bench serve --clients": "bench/test_serve_load.py::test_every_request_of_a_closed_loop_is_answered",
    "bench serve --users": "bench/test_serve_load.py::test_users_and_contexts_come_from_files",
    "rpc Recommend": f"{_GRPC}::test_several_users_are_answered_in_their_order",
    "rpc Recall": f"{_GRPC}::test_recall_gives_candidates_and_features_what_is_known",
    "rpc Features": f"{_GRPC}::test_recall_gives_candidates_and_features_what_is_known",
    "rpc Rank": f"{_GRPC}::test_rank_gives_the_scores_of_recommend",
    "rpc AddItems": f"{_GRPC}::test_changes_are_seen_by_the_next_call",
    "POST /v1/recommend": "serve/test_http.py::test_recommend_gives_k_items_best_first",
    "POST /v2/models/ranking/infer": "serve/test_inference.py::test_tritonclient_scores_over_http",
    "GET /v1/status": f"{_SERVICE}::test_the_status_tells_what_serves",
    "GET /metrics": "serve/test_http.py::test_health_metrics_live_and_the_page_are_there",
    "recmill_requests_total": _METRICS,
    "recmill_request_seconds": _METRICS,
    "recmill_stage_seconds": _METRICS,
}
